"""Records: a trace in memory, column by column: one table for each kind of event.

STEP_END       event_id  ts_ns  step  phase  batch_phase  num_seqs ...    a row an event
SAMPLE_TOKENS  event_id  ts_ns  step  phase  seq_ids  token_ids ...
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from nvtrace.analysis.cells import cells_of
from nvtrace.analysis.columns import EVENTS
from nvtrace.analysis.frames import frame_of, masked
from nvtrace.envelope import Footer, Header, Unknown
from nvtrace.events import EVENT_TYPES, Phase, codes_of
from nvtrace.export.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from nvtrace.analysis.cells import Cells
    from nvtrace.envelope import Record

_NAMES = tuple(EVENT_TYPES)
_GETTERS = {
    column.name: attrgetter(column.name) for columns in TABLES.values() for column in columns
}
_CODES = {cls: code for code, cls in enumerate((*EVENT_TYPES.values(), Header, Footer, Unknown))}
_NO_EVENTS = bytes(range(len(_NAMES), len(_CODES)))


class Records:
    """The records of some ranks of one run.

    Attributes:
        headers: by rank, in the order in which they were added.
        footers: by rank; a trace that was cut off has none.
        unknown: events of a newer nvtrace.
        num_events: by rank.
    """

    def __init__(self) -> None:
        self.headers: dict[int, Header] = {}
        self.footers: dict[int, Footer] = {}
        self.unknown: list[Unknown] = []
        self.num_events: Counter[int] = Counter()
        self._rank = 0  # whose records come now
        self._kinds = bytearray()  # of each event: its place in _NAMES
        self._cells: list[dict[str, Cells]] = [  # of each kind
            {column.name: cells_of(f"{name}.{column.name}", column.type) for column in TABLES[name]}
            for name in _NAMES
        ]

    def add(self, block: Sequence[Record]) -> None:
        """Take in some more records. A header begins the next rank's.

        Raises:
            FrameError: a number is too large for its column.
        """
        kinds = bytes(map(_CODES.__getitem__, map(type, block)))
        by_kind: list[list[Any]] = [[] for _ in _CODES]
        for kind, record in zip(kinds, block, strict=True):
            by_kind[kind].append(record)
        for columns, events in zip(self._cells, by_kind, strict=False):
            if events:
                for name, cells in columns.items():
                    cells.extend(list(map(_GETTERS[name], events)))
        self._add_others(chain(*by_kind[len(_NAMES) :]))
        kinds = kinds.translate(None, _NO_EVENTS)
        self._kinds += kinds
        self.num_events[self._rank] += len(kinds)

    def _add_others(self, records: Iterable[Record]) -> None:
        for record in records:
            if isinstance(record, Header):
                self._rank = record.rank
                self.headers[self._rank] = record
            elif isinstance(record, Footer):
                self.footers[self._rank] = record
            elif isinstance(record, Unknown):
                self.unknown.append(record)

    @property
    def header(self) -> Header:
        """The header of the first rank, which schedules."""
        return next(iter(self.headers.values()))

    @cached_property
    def _ranks(self) -> npt.NDArray[np.int64]:
        """(num_events,) the rank of each event."""
        ranks = np.fromiter(self.num_events, np.int64)
        return np.repeat(ranks, [*self.num_events.values()])

    @cached_property
    def _places(self) -> dict[str, npt.NDArray[np.intp]]:
        """For each kind of event, where its events are among all."""
        kinds = np.frombuffer(self._kinds, np.uint8)
        order = np.argsort(kinds, kind="stable")
        ends = np.searchsorted(kinds[order], np.arange(len(_NAMES) + 1)).tolist()
        return {
            name: order[first:last]
            for name, (first, last) in zip(_NAMES, pairwise(ends), strict=True)
        }

    def table(self, kind: str) -> pd.DataFrame:
        """One kind of event, with all its fields. See `Trace.table`.

        Raises:
            KeyError: there is no such kind.
        """
        if kind not in EVENT_TYPES:
            raise KeyError(f"{kind!r} is not a kind of event: these are {', '.join(EVENT_TYPES)}")
        columns = {"rank": self._ranks[self._places[kind]]}
        columns |= {name: cells.column() for name, cells in self._cells[_NAMES.index(kind)].items()}
        return pd.DataFrame(columns, copy=False)

    # -- the frame of all events -----------------------------------------------------------------

    def frame(self) -> pd.DataFrame:
        """The frame `events`."""
        kinds = np.frombuffer(self._kinds, np.uint8)
        return frame_of(
            EVENTS,
            {
                "rank": self._ranks,
                "event_id": self._numbers("event_id"),
                "event": pd.Categorical.from_codes(kinds, categories=_NAMES),
                "ts_ns": self._numbers("ts_ns"),
                "step": self._numbers("step"),
                "phase": self._words("phase", codes_of(Phase)),
                "reason": self._words("reason"),
                "seq_id": self._numbers("seq_id"),
            },
        )

    def _columns(self, field: str) -> list[tuple[npt.NDArray[np.intp], Any]]:
        """A field of all kinds that have it: where their events are, and its values."""
        return [
            (self._places[name], cells[field].column())
            for name, cells in zip(_NAMES, self._cells, strict=True)
            if field in cells and len(self._places[name])
        ]

    def _numbers(self, field: str) -> Any:  # noqa: ANN401 - a pandas array
        """(num_events,) a field's numbers; NA where it is not there."""
        data = np.zeros(len(self._kinds), np.int64)
        is_there = np.zeros(len(self._kinds), np.bool_)
        for places, column in self._columns(field):
            values = pd.Series(column)
            data[places] = values.fillna(0)
            is_there[places] = values.notna()
        return masked(data, is_there)

    def _words(self, field: str, words: Sequence[str] = ()) -> pd.Categorical:
        """(num_events,) a field's codes; NA where it is not there."""
        codes = np.full(len(self._kinds), -1, np.int32)
        of_word = {word: code for code, word in enumerate(words)}
        for places, column in self._columns(field):
            new = [of_word.setdefault(word, len(of_word)) for word in column.categories]
            codes[places] = np.array(new, np.int32)[column.codes]
        return pd.Categorical.from_codes(codes, categories=list(of_word))
