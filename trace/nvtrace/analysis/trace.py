"""Trace: a trace in memory, as DataFrames.

    trace = nvtrace.load("trace.jsonl")
    trace.steps.groupby("phase")["wall_ns"].median()
    trace.tokens.merge(trace.steps, on="step")
    trace.table("KV_BUDGET_ESTIMATE")
    trace.at(149).waiting

`columns.py` describes the frames. Each is made at its first use, and kept.
"""

from __future__ import annotations

from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from nvtrace.analysis.blocks import blocks_frame
from nvtrace.analysis.frames import without_garbage_collection
from nvtrace.analysis.records import Records
from nvtrace.analysis.requests import requests_frame, tokens_frame
from nvtrace.analysis.steps import steps_frame
from nvtrace.caveats import about_rank
from nvtrace.html import html_table
from nvtrace.reader import blocks_of_rank, rank_path, read_blocks, read_trace
from nvtrace.snapshots import SeekableTrace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pandas as pd

    from nvtrace.at import Point
    from nvtrace.envelope import Footer, Header, Record
    from nvtrace.replay import State

_BLOCK_LEN = 1024  # records whose columns are collected at once


class Trace:
    """A trace in memory. Made by `load`.

    Args:
        path: the file of the first rank that was read.
        records: what was read.
        warnings: the warnings that reading it gave.
    """

    def __init__(self, path: Path, records: Records, warnings: tuple[str, ...] = ()) -> None:
        self.path = path
        self.warnings = warnings
        self._records = records

    def __repr__(self) -> str:
        counts = self._records.num_events.items()
        events = ", ".join(f"{count:,} events of rank {rank}" for rank, count in counts)
        return f"<Trace {self.path}: {events}>"

    def _repr_html_(self) -> str:
        rows = [
            (
                *(rank, f"{self._records.num_events[rank]:,}", header.created[:19]),
                footer.exit if (footer := self._records.footers.get(rank)) else "cut off",
            )
            for rank, header in self.headers.items()
        ]
        return html_table(f"Trace {self.path}", ["rank", "events", "created", "exit"], rows)

    @property
    def header(self) -> Header:
        """What ran, where, and with which settings; of the first rank that was read."""
        return self._records.header

    @property
    def headers(self) -> dict[int, Header]:
        """The same of each rank."""
        return self._records.headers

    @property
    def footer(self) -> Footer | None:
        """How the run ended; None for a trace that was cut off."""
        return self._records.footers.get(self.header.rank)

    @cached_property
    def events(self) -> pd.DataFrame:
        """One row an event: what all events have."""
        return self._records.frame()

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row a step: what was decided, how it ran, how long it took."""
        return steps_frame(self._records)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row a request that has ended: the metrics of `nvtrace stats`.

        Raises:
            InconsistentTraceError: an event is about a request that never arrived.
        """
        return requests_frame(self._events())

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """One row a generated token."""
        return tokens_frame(self._records)

    @cached_property
    def blocks(self) -> pd.DataFrame:
        """One row an operation on a KV block."""
        return blocks_frame(self._records)

    def table(self, kind: str) -> pd.DataFrame:
        """One kind of event with all its fields, as docs/en/events.md has them, and its rank.

        Args:
            kind: its name, as "STEP_END".

        Raises:
            KeyError: there is no such kind.
        """
        if kind not in self._tables:
            self._tables[kind] = self._records.table(kind)
        return self._tables[kind]

    def _events(self) -> Iterator[Record]:
        """The first rank's records, read again, since only columns are kept."""
        num_records = 1 + self._records.num_events[self.header.rank]
        return islice(read_trace(self.path), num_records + len(self._records.unknown))

    @cached_property
    def _tables(self) -> dict[str, pd.DataFrame]:
        return {}

    def at(self, step: int | None = None, point: Point = "end") -> State:
        """The engine's whole state at a moment of a step, as `nvtrace at` shows it.

        Args:
            step: the engine_step; None for the last.
            point: "schedule", when it was decided what to compute; or "end".

        Raises:
            NoSuchStepError: no such step; the message gives those that there are.
            InconsistentTraceError: an event cannot follow from those before it.
        """
        return SeekableTrace(self.path).at(step, point).state


def load(path: str | Path, *, rank: int | None = None) -> Trace:
    """Read a whole trace into memory: some three times the size of the file.

    Args:
        path: rank 0's trace; .gz and .zst are decompressed.
        rank: of several, read this one's only. None for all that lie beside `path`.

    Raises:
        UnreadableTraceError: no such file, not a trace, or a line that is no record.
        NewerTraceError: the trace's format is of a newer major version.
        FrameError: a number is too large for its column.
    """
    warnings: list[str] = []
    first = Path(path) if rank is None else rank_path(Path(path), rank)
    records = Records()
    with without_garbage_collection():
        for block in gathered(read_blocks(first, warn=warnings.append)):
            records.add(block)
        header = records.header
        if rank is None and header.rank == 0:
            for other in range(1, header.world_size):
                for block in gathered(blocks_of_rank(first, other, header, warnings.append)):
                    records.add(block)
    if header.rank and not len(records.table("ENGINE_READY")):
        warnings.append(about_rank(first, header.rank))
    return Trace(first, records, tuple(warnings))


def gathered(blocks: Iterable[list[Record]]) -> Iterator[list[Record]]:
    """The same records in larger lists: small enough for the cache, large enough for numpy."""
    block: list[Record] = []
    for part in blocks:
        block += part
        if len(block) >= _BLOCK_LEN:
            yield block
            block = []
    if block:
        yield block
