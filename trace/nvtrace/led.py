"""Led: the own trace of a rank for which another one decides.

    trace.jsonl          rank 0: requests, queues, tokens, times
    trace.rank1.jsonl    rank 1: how it started, and what it computed in each step

Knows how such a trace is told from others: its rank never says ENGINE_READY. (Those that torchrun
started do, and decide as rank 0 does.) Does not know how ranks are read together (`reader.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvtrace.envelope import Header
from nvtrace.events import EngineReady
from nvtrace.reader import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from nvtrace.envelope import Record


def about_rank(name: str | Path, rank: int) -> str:
    """What the trace of such a rank is, and where the rest of its run is."""
    name = name_of(name)
    before, found, after = str(name).rpartition(f".rank{rank}")
    first = f"rank 0's, {before}{after}" if found else "rank 0's trace"
    return (
        f"{name} is rank {rank}'s own trace: how it started, and what it computed in each step. It "
        f"decides nothing: the requests, queues, tokens and the times of steps are in {first}"
    )


def saying_whose(
    records: Iterable[Record], name: str | Path, warn: Callable[[str], None]
) -> Iterator[Record]:
    """Pass records on; if they are of such a rank, say so at their end.

    Args:
        records: what `read_trace` yields.
        name: of the trace.
        warn: takes the sentence.
    """
    rank = 0
    for record in records:
        if isinstance(record, Header):
            rank = record.rank
        elif rank and isinstance(record, EngineReady):
            rank = 0
        yield record
    if rank:
        warn(about_rank(name, rank))
