"""Caveats: what a reader must know before trusting a trace. Found while its records are read.

    trace.jsonl          rank 0: requests, queues, tokens, times
    trace.rank1.jsonl    rank 1: how it started, and what it computed in each step

A trace may be the one of a rank that does not schedule: it has no ENGINE_READY. (Ranks that
torchrun started all schedule, and have one.) It may be simulated, with steps whose time is unknown.
It may have codes that this nvtrace does not know.

Damaged and missing events are counted in `tally.py`; ranks are read together in `reader.py`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from nvtrace.envelope import Header
from nvtrace.events import EngineReady, Event, tag_of, unknown_codes
from nvtrace.reader import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from nvtrace.envelope import Record

_MOST_CODES = 10  # told of, each by itself


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


def saying_untimed(
    records: Iterable[Record], name: str | Path, warn: Callable[[str], None]
) -> Iterator[Record]:
    """Pass records on; if the header tells of steps without a time, warn of it first.

    `nvtrace whatif --out` leaves such a trace, where nobody knows how long a step would take.
    """
    for record in records:
        if isinstance(record, Header) and (num := record.facts.clock.num_untimed_steps):
            warn(
                f"{name_of(name)} is simulated, and {num:,} of its steps are unlike any "
                "recorded step: they have no simulated time, so do not read times from it"
            )
        yield record


def saying_unknown_codes(
    records: Iterable[Record], name: str | Path, warn: Callable[[str], None]
) -> Iterator[Record]:
    """Pass records on; at their end, warn of codes whose meaning is not known here."""
    found: Counter[tuple[str, str, str]] = Counter()
    for record in records:
        if isinstance(record, Event):
            for field, code in unknown_codes(record).items():
                found[tag_of(record), field, code if len(found) < _MOST_CODES else "..."] += 1
        yield record
    for (tag, field, code), number in found.items():
        warn(
            f"{name}: {field} is {code!r} in {number:,} events {tag}: nvtrace does not know this "
            "code, and has not checked the decisions with it"
        )
