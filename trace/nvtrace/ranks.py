"""The files of ranks above 0, and the run_id that all ranks share.

    trace.jsonl          rank 0: requests, queues, blocks, and what it computed
    trace.rank1.jsonl    rank 1, the same run_id: its start, and what it computed in each step

A rank that the engine started has no requests, queues or block manager: these are on rank 0, and in
its trace. `reader.py` reads the files of all ranks together.
"""

from __future__ import annotations

import os
from itertools import count
from typing import TYPE_CHECKING

from nanovllm.parallel.torchrun import TorchrunRank
from nvtrace.files import is_plain, move
from nvtrace.reader import rank_path

if TYPE_CHECKING:
    from pathlib import Path


def keep_ranks(path: Path, kept: Path) -> list[tuple[Path, Path]]:
    """After rank 0's old trace was renamed from `path` to `kept`, rename those of the other ranks.

    A file whose new name is in use is not renamed.

    Returns:
        (old, new) name of each renamed file.
    """
    renamed: list[tuple[Path, Path]] = []
    for rank in count(1):
        old = rank_path(path, rank)
        new = move(old, [rank_path(kept, rank)], is_plain)
        if new is None:
            break
        renamed.append((old, new))
    return renamed


def shared_run_id(run_id: str, world_size: int) -> str:
    """Return the same run_id on all ranks that torchrun started."""
    torchrun = TorchrunRank.from_environment(os.environ)
    if torchrun is None or torchrun.world_size == 1 or torchrun.world_size != world_size:
        return run_id
    from nanovllm.parallel.ranks import share  # noqa: PLC0415 - loads torch, as the engine does then

    return share("nvtrace/run_id", run_id)
