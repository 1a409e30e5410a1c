"""Settings: those of an engine that decide its schedule, and can be changed in a re-run."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from nanovllm.engine.policies import POLICIES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvtrace import events as ev

_TRUTHS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_SHORTEST_MODEL_LEN = 2  # one token of prompt, one of completion


class WhatIfError(ValueError):
    """A re-run that is not possible with this trace. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that decide a schedule, by the names that `LLM` takes."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    kvcache_block_size: int
    num_kvcache_blocks: int
    enable_prefix_caching: bool
    policy: str

    @classmethod
    def of(cls, init: ev.EngineInit, ready: ev.EngineReady) -> Settings:
        """Those of a recorded engine."""
        return cls(
            max_num_batched_tokens=init.max_num_batched_tokens,
            max_num_seqs=init.max_num_seqs,
            max_model_len=init.max_model_len,
            kvcache_block_size=init.block_size,
            num_kvcache_blocks=ready.num_kvcache_blocks,
            enable_prefix_caching=init.enable_prefix_caching,
            policy=init.policy,
        )

    def changed(self, changes: Mapping[str, str]) -> Settings:
        """A copy with some settings changed.

        Args:
            changes: name -> value, as text.

        Raises:
            WhatIfError: an unknown name, or a wrong value.
        """
        values: dict[str, int | bool | str] = {}
        for name, text in changes.items():
            if name not in NAMES:
                raise WhatIfError(f"{name!r} is not a scheduler setting: use {', '.join(NAMES)}")
            match getattr(self, name):
                case bool():
                    values[name] = _truth(name, text)
                case int():
                    values[name] = _whole_number(name, text)
                case _:
                    values[name] = text
        return replace(self, **values)  # type: ignore[arg-type]  # each of its field's type

    @property
    def is_known(self) -> bool:
        """Does this installation have the policy?"""
        return self.policy in POLICIES

    def check(self) -> None:
        """Refuse a policy that this installation does not have.

        Raises:
            WhatIfError: see above.
        """
        if not self.is_known:
            raise WhatIfError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")


NAMES = tuple(field.name for field in fields(Settings))


def parse_changes(assignments: list[str]) -> dict[str, str]:
    """Assignments ("policy=mixed") -> name -> value.

    Raises:
        WhatIfError: one is not an assignment, or two set the same name.
    """
    changes: dict[str, str] = {}
    for assignment in assignments:
        name, sign, value = (part.strip() for part in assignment.partition("="))
        if not (name and sign and value):
            raise WhatIfError(
                f"{assignment!r} is not a setting: write NAME=VALUE, such as policy=mixed"
            )
        if name in changes:
            raise WhatIfError(
                f"{name} is set twice in one case: to compare two values, give two --case"
            )
        changes[name] = value
    return changes


def _whole_number(name: str, text: str) -> int:
    least = _SHORTEST_MODEL_LEN if name == "max_model_len" else 1
    most = 2**24 if name == "num_kvcache_blocks" else 2**31
    if not text.isascii() or not text.isdigit() or not least <= int(text[:20]) < most:
        raise WhatIfError(f"{name} must be a whole number from {least} to {most - 1}, not {text!r}")
    return int(text)


def _truth(name: str, text: str) -> bool:
    if text.lower() not in _TRUTHS:
        raise WhatIfError(f"{name} must be true or false, not {text!r}")
    return _TRUTHS[text.lower()]
