"""Tally: missing events and unknown events of a trace, counted while it is read.

Events are numbered without gaps (`event_id`); the footer has their number.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING

from nvtrace.envelope import Footer, Header, Record, Unknown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_EVENT_ID = attrgetter("event_id")


class Tally:
    """Counts the unknown and the missing events of a trace.

    Attributes:
        num_after_footer: lines after the footer; None before it has come.
    """

    def __init__(self) -> None:
        self._last: Record | None = None
        self.num_after_footer: int | None = None
        self._last_id = 0
        self._num_missing = 0
        self._is_filtered = False
        self._unknown: Counter[str] = Counter()

    @property
    def has_header(self) -> bool:
        """Has the header, the first record, come?"""
        return self._last is not None

    def count(self, records: list[Record]) -> bool:
        """Count some more records. Returns True at the first gap of a trace that was filtered."""
        if not records:
            return False
        had_none = not self._num_missing
        if isinstance(records[0], Header):
            self._is_filtered = records[0].is_filtered
        self._last = records[-1]
        if self.num_after_footer is not None:
            self.num_after_footer += len(records)
        elif Footer in (types := [*map(type, records)]):
            self.num_after_footer = len(types) - 1 - types.index(Footer)
        try:
            event_ids = [*map(_EVENT_ID, records)]
        except AttributeError:  # a header, or unknown events
            event_ids = [*self._numbers(records)]
        if event_ids != [*range(self._last_id + 1, self._last_id + 1 + len(event_ids))]:
            for before, event_id in pairwise([self._last_id, *event_ids]):
                self._num_missing += max(event_id - before - 1, 0)
        if event_ids:
            self._last_id = event_ids[-1]
        return self._is_filtered and had_none and self._num_missing > 0

    def _numbers(self, records: list[Record]) -> Iterator[int]:
        for record in records:
            event_id: object = None
            if isinstance(record, Unknown):
                self._unknown[record.event] += 1
                event_id = record.fields.get("event_id")
            elif not isinstance(record, Header):
                event_id = record.event_id
            if isinstance(event_id, int):
                yield event_id

    def complaints(self, name: str | Path) -> Iterator[str]:
        """The warnings, at the end of the trace."""
        if self._unknown:
            kinds = ", ".join(f"{tag} x {count}" for tag, count in sorted(self._unknown.items()))
            yield f"{name}: events of a newer nvtrace were skipped: {kinds}"
        num_missing, last = self._num_missing, self._last
        if isinstance(last, Footer):
            num_missing -= last.num_dropped
        elif self._is_filtered:
            num_missing = 0  # a processor may have dropped all of them
        if num_missing > 0:
            missing = f"{num_missing} events are missing"
            yield f"{name}: {missing}, according to the event ids"
        if self.num_after_footer:
            behind = f"{self.num_after_footer} lines come after the footer"
            yield f"{name}: {behind}, which must be the last"
        if self.num_after_footer is None:
            yield f"{name} has no footer: the run was cut off; everything it wrote was read"
