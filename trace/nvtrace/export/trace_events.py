"""Trace events of Chrome's JSON format, put out in the order of their times.

    begin / end     a slice; within a track a slice lies wholly inside the one around it
    instant         a moment
    counter         a number from here on
    flow            one end or waypoint of an arrow; it belongs to the innermost slice open there

A step's beginning is known only when it ends, so events are kept here until no earlier one can
come. Events with the same time stay in the order in which they were added.

A viewer reads numbers as JavaScript does, so an argument above 2^53 is written as text. A counter's
value is a double. The format is Google's "Trace Event Format", which Perfetto imports.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_NS_PER_US = 1000  # the format counts in microseconds; its fractions keep our nanoseconds
_LARGEST = 2**53  # up to here every integer is a double


class Track(NamedTuple):
    """A row of the timeline: a thread of a process, in the format's words."""

    pid: int
    tid: int


class TraceEvents:
    """Events that are put out in the order of their times."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, dict[str, Any]]] = []
        self._numbers = count()

    def name_process(self, pid: int, name: str) -> None:
        """Name a group of tracks; groups are shown by their number."""
        for kind, value in (("process_name", name), ("process_sort_index", pid)):
            self._add(0, {"ph": "M", "pid": pid, "name": kind, "args": _labelled(kind, value)})

    def name_track(self, track: Track, ts_ns: int, name: str) -> None:
        """Name a track; tracks are shown by their number."""
        for kind, value in (("thread_name", name), ("thread_sort_index", track.tid)):
            event = {"ph": "M", **track._asdict(), "name": kind, "args": _labelled(kind, value)}
            self._add(ts_ns, event)

    def begin(self, track: Track, ts_ns: int, name: str, args: dict[str, Any]) -> None:
        """A slice begins inside the one that is open on its track."""
        event = {"ph": "B", **_at(track, ts_ns), "name": name, "args": _fitting(args)}
        self._add(ts_ns, event)

    def end(self, track: Track, ts_ns: int, args: dict[str, Any] | None = None) -> None:
        """The innermost open slice of the track ends; `args` join those of its beginning."""
        self._add(ts_ns, {"ph": "E", **_at(track, ts_ns), "args": _fitting(args or {})})

    def instant(self, track: Track, ts_ns: int, name: str, args: dict[str, Any]) -> None:
        """A moment on a track."""
        place = {"ph": "i", "s": "t", **_at(track, ts_ns)}
        self._add(ts_ns, {**place, "name": name, "args": _fitting(args)})

    def counter(self, pid: int, ts_ns: int, name: str, what: str, value: int) -> None:
        """A number of a process, until the next value; Perfetto calls it `name` and `what`."""
        event = {"ph": "C", "pid": pid, "ts": ts_ns / _NS_PER_US, "name": name}
        self._add(ts_ns, {**event, "args": {what: value}})

    def flow(
        self, part: Literal["s", "t", "f"], flow_id: int, track: Track, ts_ns: int, name: str
    ) -> None:
        """An arrow's start, waypoint or end, in the slice that is open there."""
        event = {"ph": part, "id": flow_id, **_at(track, ts_ns), "name": name, "cat": "flow"}
        self._add(ts_ns, event | ({"bp": "e"} if part == "f" else {}))

    def until(self, ts_ns: float) -> Iterator[dict[str, Any]]:
        """Yield all events up to a time, in order."""
        while self._waiting and self._waiting[0][0] <= ts_ns:
            yield heapq.heappop(self._waiting)[2]

    def _add(self, ts_ns: int, event: dict[str, Any]) -> None:
        heapq.heappush(self._waiting, (ts_ns, next(self._numbers), event))


def _at(track: Track, ts_ns: int) -> dict[str, Any]:
    return {"pid": track.pid, "tid": track.tid, "ts": ts_ns / _NS_PER_US}


def _fitting(args: dict[str, Any]) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, int) and abs(value) > _LARGEST else value
        for name, value in args.items()
    }


def _labelled(kind: str, value: object) -> dict[str, object]:
    return {"sort_index" if kind.endswith("sort_index") else "name": value}
