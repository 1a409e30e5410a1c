"""Validate: check the format of a trace line by line. Every fault has its line number.

It checks the structs (which are the JSON Schema) and the rules of the envelope. Whether the events
are consistent with each other is checked by `nvtrace.check`.

    header first and once; event_id 1, 2, 3 ... (with gaps if the header says that events were
    dropped); ts_ns and step never decrease; footer last, with the right number of events

A reader stops at the first line that is not a record; this goes on. Unknown fields and events, of a
newer minor version, are not faults, nor is a missing footer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from nvtrace.envelope import SCHEMA, Footer, Header, Record, Unknown, check_version, decode_strictly
from nvtrace.events import Event, tag_of
from nvtrace.reader import UnreadableTraceError, name_of, open_trace, raw_lines, why_no_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_LONGEST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a line.

    Attributes:
        line: its number, from 1.
        code: the rule that it breaks; the message is in the catalogs, `validate_<code>`.
        facts: the values in the message.
    """

    line: int
    code: str
    facts: dict[str, Any] = field(default_factory=dict)


class Validator:
    """Checks a file line by line.

    Attributes:
        num_lines: lines so far that are not blank.
        num_unknown: how many of them are unknown events.
        has_footer: was there a footer?
        has_gaps: did processors drop events?
    """

    def __init__(self) -> None:
        self.num_lines = self.num_unknown = 0
        self.has_footer = self.has_gaps = False
        self._is_filtered = False  # may events be missing?
        self._num_events = 0
        self._last_id: int | None = 0  # None: the previous line could not be read
        self._last_ts_ns = self._last_step = 0

    def take(self, number: int, line: bytes) -> Iterator[Fault]:
        """Check one line. Yields its faults.

        Raises:
            NewerTraceError: it is the header of a newer major version.
        """
        self.num_lines += 1
        is_after_footer, is_first = self.has_footer, self.num_lines == 1
        record, fault = _read(line)
        if is_after_footer:
            yield Fault(number, "after_footer")
        if fault is not None:
            self._last_id = None
            self._num_events += not is_first
            yield Fault(number, *fault)
        elif isinstance(record, Header):
            yield from self._header(number, record, is_first=is_first)
        elif is_first:
            yield Fault(number, "no_header")
        if isinstance(record, Event | Unknown | Footer):
            yield from self._place(number, record)
        if isinstance(record, Event):
            yield from self._event(number, record)
        elif isinstance(record, Footer):
            yield from self._footer(number, record)

    def _header(self, number: int, header: Header, *, is_first: bool) -> Iterator[Fault]:
        self._is_filtered = header.is_filtered
        if not is_first:
            yield Fault(number, "second_header")
        if header.schema != SCHEMA:
            yield Fault(number, "other_schema", {"schema": _shown(header.schema)})
        check_version({"version": [*header.version]})

    def _place(self, number: int, record: Event | Unknown | Footer) -> Iterator[Fault]:
        """Check that event ids have no gaps; after a gap, count on from the new id."""
        self._num_events += not isinstance(record, Footer)
        event_id: object
        if isinstance(record, Unknown):
            self.num_unknown += 1
            event_id = record.fields.get("event_id")
        else:
            event_id = record.event_id
        wanted = None if self._last_id is None else self._last_id + 1
        if self._is_filtered and wanted and isinstance(event_id, int) and event_id > wanted:
            self.has_gaps = True
        elif wanted is not None and event_id != wanted:
            yield Fault(number, "event_id", {"have": _shown(event_id), "wanted": wanted})
        self._last_id = event_id if isinstance(event_id, int) else None

    def _event(self, number: int, event: Event) -> Iterator[Fault]:
        if event.ts_ns < self._last_ts_ns:
            facts = {"event": tag_of(event), "have": event.ts_ns, "before": self._last_ts_ns}
            yield Fault(number, "ts_back", facts)
        self._last_ts_ns = event.ts_ns
        if event.step is None:
            return
        if event.step < max(self._last_step, 1):
            facts = {"event": tag_of(event), "have": event.step, "before": self._last_step}
            yield Fault(number, "step_back", facts)
        self._last_step = event.step

    def _footer(self, number: int, footer: Footer) -> Iterator[Fault]:
        self.has_footer = True
        counted = self._num_events + footer.num_dropped
        if footer.num_events != counted:
            facts = {"have": footer.num_events, "counted": counted}
            yield Fault(number, "num_events", facts)


def validate(
    source: str | Path, validator: Validator, *, warn: Callable[[str], None]
) -> Iterator[Fault]:
    """Yield every fault of a trace while reading it, in bounded memory.

    Args:
        source: see `nvtrace.reader.read_trace`.
        validator: a new one; afterwards it has the counts.
        warn: called with a message about something unusual that is not a fault.

    Raises:
        UnreadableTraceError: the file does not exist, is empty, or has an unknown compression or
            encoding.
        NewerTraceError: the trace's format has a newer major version.
    """
    name = name_of(source)
    with open_trace(source) as file:
        for number, line, is_whole in raw_lines(file, name):
            no_text = None if validator.num_lines else why_no_text(name, line)
            if no_text is not None:
                raise UnreadableTraceError(no_text)
            may_be_cut = not is_whole and number > 1 and not validator.has_footer
            if may_be_cut and _read(line)[1] is not None:
                warn(f"{name}: the last line ({number}) is cut")
                break
            yield from validator.take(number, line)
    if not validator.num_lines:
        raise UnreadableTraceError(f"{name} is empty: no trace was written to it")
    if validator.num_unknown:
        warn(f"{name}: {validator.num_unknown} events are of a newer nvtrace")
    if validator.has_gaps:
        warn(f"{name}: the processors of record() dropped some events")
    if not validator.has_footer:
        warn(f"{name} has no footer: the run was cut off")


def _read(line: bytes) -> tuple[Record | None, tuple[str, dict[str, Any]] | None]:
    """The record, or (code, facts) of the fault."""
    try:
        try:
            return decode_strictly(line), None
        except msgspec.ValidationError as error:
            reason = str(error)
            value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return None, ("not_json", {"error": _shown(error)})
    if not isinstance(value, dict):
        return None, ("not_an_object", {"have": _shown(value)})
    if not isinstance(value.get("event"), str):
        return None, ("no_event", {})
    return None, ("not_the_schema", {"event": value["event"], "error": reason})


def _shown(value: object) -> str:
    """A value from the file as text, shortened."""
    text = str(value) if isinstance(value, str | Exception) else json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
