"""Launch: this process's place, where a launcher such as torchrun started a process a rank.

Knows the environment variables of torch's launchers. Does not know torch, so that whoever only
needs to know which rank this is (for a file's name, say) need not load it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class TorchrunRank:
    """One of `world_size` processes that run the same script.

    Attributes:
        rank: this one's number.
        world_size: how many there are, on all machines together.
        local_rank: this one's number on its machine.
        num_local_ranks: how many there are on its machine.
    """

    rank: int
    world_size: int
    local_rank: int
    num_local_ranks: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> TorchrunRank | None:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.

        Returns:
            None if no launcher has started this process: RANK, WORLD_SIZE, MASTER_ADDR and
            MASTER_PORT are not all there.

        Raises:
            ValueError: one of them is no sensible number.
        """
        if not all(environment.get(name) for name in _REQUIRED):
            return None
        rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        if rank >= world_size:
            raise ValueError(f"the environment has RANK={rank} of WORLD_SIZE={world_size}")
        return cls(
            rank,
            world_size,
            _number(environment, "LOCAL_RANK", default=rank),
            _number(environment, "LOCAL_WORLD_SIZE", default=world_size),
        )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name) or str(default)
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"the environment variable {name} must be a whole number, not {text!r}")
    return int(text)
