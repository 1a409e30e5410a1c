"""TorchrunRank: which rank this process is, if torchrun (or a launcher like it) started it.

It is read from the environment, without torch, so that a program that only needs the rank (for a
file name, say) need not load torch.
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
        rank: of this process.
        world_size: the number of processes, on all machines together.
        local_rank: of this process on its machine.
        num_local_ranks: the number of processes on this machine.
    """

    rank: int
    world_size: int
    local_rank: int
    num_local_ranks: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> TorchrunRank | None:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.

        Returns:
            None if no launcher has started this process: not all of RANK, WORLD_SIZE, MASTER_ADDR
            and MASTER_PORT are set.

        Raises:
            ValueError: one of them is not a whole number, or RANK is not below WORLD_SIZE.
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
