"""SamplingParams: what one request asks of the sampler, checked at the door.

Knows the legal range of each parameter. Does not know the request's prompt, the model or how a
token is drawn (`layers/sampler.py`). The names and meanings are vLLM's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

_SEED_LIMIT = 2**64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Attributes:
        temperature: 0 takes the most likely token (greedy, lowest id on ties); larger is bolder.
        max_tokens: the request ends after this many generated tokens, at least 1.
        ignore_eos: go on after an end-of-sequence token (for benchmarks).
        top_k: draw among the k most likely tokens only; None means all.
        top_p: draw among the fewest tokens whose probabilities reach this sum, in (0, 1].
        seed: the same seed gives the same tokens, whoever shares the batch; None lets the engine
            give each request a seed of its own.

    Raises:
        TypeError: a value is not of its type.
        ValueError: a value is out of its range.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(self, "temperature", Real, 0.0 <= self.temperature < math.inf, "a number >= 0")
        _require(self, "max_tokens", Integral, self.max_tokens >= 1, "a whole number >= 1")
        _require(self, "top_p", Real, 0.0 < self.top_p <= 1.0, "a number in (0, 1]")
        if self.top_k is not None:
            _require(self, "top_k", Integral, self.top_k >= 1, "a whole number >= 1, or None")
        if self.seed is not None:
            in_range = 0 <= self.seed < _SEED_LIMIT
            _require(self, "seed", Integral, in_range, "a whole number in [0, 2**64), or None")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")


def _require(
    params: SamplingParams, name: str, kind: type[object], in_range: bool, what: str
) -> None:
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be {what}, not {value!r}")
    if not in_range:
        raise ValueError(f"{name} must be {what}, not {value!r}")
