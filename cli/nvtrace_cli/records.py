"""A trace's records, with an eye on how far its file is read.

Knows which files have a place that can be told. Does not know what becomes of a record. Imports
nothing heavy before it reads.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nvtrace.envelope import Header, Record

_MOST_CODES = 10  # told of, each by itself


def records_of(
    file: str, warn: Callable[[str], None], watch: Callable[[int], None]
) -> Iterator[Record]:
    """What `nvtrace.reader.read_trace` yields; at its end it is said if it decides nothing.

    Args:
        file: path of the trace, "-" for stdin.
        warn: see there.
        watch: takes the number of the file's bytes read so far; of standard input it hears nothing.
    """
    from nvtrace.led import saying_whose  # noqa: PLC0415 - --help needs no msgspec

    yield from saying_whose(_records_of(file, warn, watch), file, warn)


def _records_of(
    file: str, warn: Callable[[str], None], watch: Callable[[int], None]
) -> Iterator[Record]:
    from nvtrace.reader import read_trace  # noqa: PLC0415 - --help needs no msgspec

    path = Path(file)
    if not (path.is_file() and os.access(path, os.R_OK)):
        yield from read_trace(file, warn=warn)
        return
    with path.open("rb") as opened:
        for record in read_trace(opened, warn=warn):
            watch(opened.tell())
            yield record


def saying_untimed(
    records: Iterator[Record], file: str, warn: Callable[[str], None]
) -> Iterator[Record]:
    """Pass records on; if the header tells of steps without a time, warn of it first.

    `nvtrace whatif --out` leaves such a trace, where nobody knows how long a step would take.
    """
    from nvtrace.envelope import Header  # noqa: PLC0415 - --help needs no msgspec
    from nvtrace.reader import name_of  # noqa: PLC0415 - the same

    for record in records:
        if isinstance(record, Header) and (num := record.facts.clock.num_untimed_steps):
            warn(
                f"{name_of(file)} is simulated, and {num:,} of its steps are unlike any "
                "recorded step: they have no simulated time, so do not read times from it"
            )
        yield record


def saying_unknown_codes(
    records: Iterable[Record], file: str, warn: Callable[[str], None]
) -> Iterator[Record]:
    """Pass records on; at their end, warn of codes whose meaning is not known here."""
    from nvtrace.events import Event, tag_of, unknown_codes  # noqa: PLC0415 - needs msgspec

    found: Counter[tuple[str, str, str]] = Counter()
    for record in records:
        if isinstance(record, Event):
            for field, code in unknown_codes(record).items():
                found[tag_of(record), field, code if len(found) < _MOST_CODES else "..."] += 1
        yield record
    for (tag, field, code), number in found.items():
        warn(
            f"{file}: {field} is {code!r} in {number:,} events {tag}: nvtrace does not know this "
            "code, and has not checked the decisions with it"
        )


def records_of_first_rank(
    file: str, warn: Callable[[str], None], watch: Callable[[int], None]
) -> Iterator[Record]:
    """The records of the rank that tells all, while those of the others are looked at as well.

    Args:
        file: path of the trace, "-" for stdin.
        warn: see `nvtrace.reader.read_ranks`.
        watch: see `records_of`; if there are several files, it hears nothing.
    """
    from nvtrace.reader import read_ranks  # noqa: PLC0415 - --help needs no msgspec

    records = records_of(file, warn, watch)
    header = cast("Header", next(records))
    if header.world_size == 1 or header.rank or not Path(file).is_file():
        yield from itertools.chain([header], records)
        return
    yield from (record for rank, record in read_ranks(file, warn=warn) if rank == header.rank)
