"""StepCache: the steps near the current one, so that going back is as fast as going forward.

A `SeekableTrace` has a snapshot of the state every few megabytes: a segment. For the last few
segments, the cache keeps the records, a summary of each step, and the state every few steps. So the
state of a step is a fold over a few steps, and memory does not grow with the trace.

    trace   |--------|--------|--------|--------|      a segment: a few megabytes
    cache            |.....................|           the last three, a state every few steps
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from nvtrace.at import moments
from nvtrace.events import Event
from nvtrace.query import parse
from nvtrace.reader import read_trace
from nvtrace.snapshots import NoSuchStepError, load_state, save_state
from nvtrace.summarize import summarize_steps
from nvtrace.summary import RequestSummary, RunSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nvtrace.at import Moment, Point, StepPoint
    from nvtrace.envelope import Header
    from nvtrace.events import AnyEvent
    from nvtrace.query import Condition
    from nvtrace.replay import State
    from nvtrace.snapshots import SeekableTrace
    from nvtrace.summary import StepSummary

MARKERS = (
    *("STATE_TRANSITION", "REQUEST_ABORT", "REQUEST_REFUSED"),
    *("ENGINE_ERROR", "ENGINE_RESET"),
)
"""A step is a marker if a request is admitted, preempted or ends, or there is an error."""

_MARKERS = frozenset(MARKERS)
_MARKED = parse(" or ".join(f"event == {tag}" for tag in MARKERS))
_MOST_SEGMENTS = 3
_STEPS_APART = 32  # from one kept state to the next, at least
_BYTES_A_STEP = 4096  # of kept states, at most


@dataclass(frozen=True, slots=True)
class StepDetails:
    """One moment, and the events of its step.

    Attributes:
        moment: the state and the decision.
        events: of the step, and those since the previous one.
        num_done: how many of them come before the moment.
        summary: the step as a row of the step table.
    """

    moment: Moment
    events: list[AnyEvent]
    num_done: int
    summary: StepSummary


class _Requests(dict[int, RequestSummary]):
    """The requests of a segment; events may also name one that ended before it."""

    def __missing__(self, seq_id: int) -> RequestSummary:
        return RequestSummary(seq_id, prompt_len=0, max_tokens=0, enqueued_ns=0)


@dataclass(slots=True)
class _Segment:
    """A piece of a trace.

    Attributes:
        events: of the segment.
        steps, indexes: its steps and their numbers.
        begins: the index of each step's first event; those before the step count as its own.
        states: index in `steps` -> the state before that step.
    """

    events: list[AnyEvent]
    steps: list[StepSummary] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    states: dict[int, bytes] = field(default_factory=dict)

    def fold(self, header: Header, state: State) -> None:
        """Read the segment once, and keep what random access needs.

        Args:
            header: of the trace.
            state: at its beginning.
        """
        self.states[0] = save_state(state)
        run, next_kept = RunSummary(header, requests=_Requests()), _STEPS_APART
        for step in summarize_steps(self.events, run, state):
            self.steps.append(step)
            self.indexes.append(step.index)
            place = len(self.steps)
            # After an interrupted step, part of its state may be in no kept state.
            if place >= next_kept and step.wall_ns is not None:
                data = self.states[place] = save_state(state)
                next_kept = place + max(_STEPS_APART, len(data) // _BYTES_A_STEP)
        self._note_begins()

    def _note_begins(self) -> None:
        last_step, end = None, 0
        for place, event in enumerate(self.events):
            if event.step is None:
                continue
            if event.step != last_step:
                self.begins.append(end)
                last_step = event.step
            end = place + 1

    def look(self, index: int, point: Point) -> StepDetails:
        """A moment of a step; the other moment if the step lacks this one."""
        place = bisect_left(self.indexes, index)
        entrance = max(kept for kept in self.states if kept <= place)
        stops = [*self.begins[1:], len(self.events)]
        events = self.events[self.begins[place] : stops[place]]
        rest = self.events[self.begins[entrance] : stops[place]]
        found, num_done = None, 0
        for moment in moments(rest, load_state(self.states[entrance]), inputs_of=index):
            if moment.step == index:
                found = moment
                num_done += len(moment.news)
                if moment.point == point:
                    break
        assert found is not None  # noqa: S101 - a step that has a summary has a moment
        return StepDetails(found, events, num_done, self.steps[place])


class StepCache:
    """A trace, read step by step.

    Args:
        trace: the trace.

    Attributes:
        first, last: numbers of its first and last step.

    Raises:
        NoSuchStepError: the trace has no steps.
        UnreadableTraceError, NewerTraceError, InconsistentTraceError: see `read_trace`.
    """

    def __init__(self, trace: SeekableTrace) -> None:
        self._trace = trace
        self._segments: OrderedDict[int, _Segment] = OrderedDict()
        records = read_trace(trace.path, name=trace.name)
        self._header = cast("Header", next(records))
        numbers = range(trace.num_segments)
        first, last = self._first_with_steps(numbers), self._first_with_steps(numbers[::-1])
        if first is None or last is None:
            raise NoSuchStepError(f"{trace.name} has no steps")
        self.first, self.last = first.indexes[0], last.indexes[-1]

    def nearest(self, step: int) -> int:
        """The step of this number, else the next one, else the last."""
        step = min(max(step, self.first), self.last)
        _, segment = self._segment_with(step)
        return segment.indexes[bisect_left(segment.indexes, step)]

    def beside(self, step: int, by: int) -> int:
        """The step `by` steps after this one (negative: before), or the first or last step."""
        found = self.around(step, max(-by, 0), max(by, 0))
        return found[-1 if by > 0 else 0].index

    def around(self, step: int, before: int, after: int) -> list[StepSummary]:
        """The step and its neighbours: so many before and after it, as far as they exist."""
        number, segment = self._segment_with(step)
        place = bisect_left(segment.indexes, step)
        found = segment.steps[max(place - before, 0) : place + after + 1]
        num_before = min(place, before)
        for other in range(number)[::-1]:
            if num_before == before:
                break
            earlier = self._segment(other).steps[num_before - before :]
            found, num_before = earlier + found, num_before + len(earlier)
        for other in range(number + 1, self._trace.num_segments):
            missing = num_before + 1 + after - len(found)
            if not missing:
                break
            found = found + self._segment(other).steps[:missing]
        return found

    def look(self, step: int, point: Point) -> StepDetails:
        """A moment of an existing step; its other moment if it lacks this one."""
        return self._segment_with(step)[1].look(step, point)

    def marker(self, step: int, watch: Callable[[int], None], *, is_backwards: bool) -> int | None:
        """The next step with one of MARKERS, or the one before; None if there is none.

        Args:
            step: where to start; this step does not count.
            watch: see `SeekableTrace.find`.
            is_backwards: search backwards.
        """
        _, segment = self._segment_with(step)
        place = bisect_left(segment.indexes, step)
        near = segment.steps[:place][::-1] if is_backwards else segment.steps[place + 1 :]
        found = next((other.index for other in near if other.tags & _MARKERS), None)
        if found is not None:
            return found
        edge = segment.indexes[0] - 1 if is_backwards else segment.indexes[-1] + 1
        place_found = self.find(_MARKED, edge, watch, is_backwards=is_backwards)
        return None if place_found is None else place_found.step

    def find(
        self, condition: Condition, step: int, watch: Callable[[int], None], *, is_backwards: bool
    ) -> StepPoint | None:
        """The nearest place where a condition holds; see `SeekableTrace.find`.

        Args:
            condition: what to look for.
            step: where to start; this step counts.
            watch: called with each step that is examined. What it raises ends the search.
            is_backwards: search backwards.
        """
        if not self.first <= step <= self.last:
            return None
        return self._trace.find(condition, step=step, is_backwards=is_backwards, watch=watch)

    # -- segments --------------------------------------------------------------------------------

    def _first_with_steps(self, numbers: Iterable[int]) -> _Segment | None:
        return next((s for s in map(self._segment, numbers) if s.steps), None)

    def _segment_with(self, step: int) -> tuple[int, _Segment]:
        number = self._trace.segment_of(step)
        return number, self._segment(number)

    def _segment(self, number: int) -> _Segment:
        """A segment, from the cache if it is there."""
        if number not in self._segments:
            state, records = self._trace.segment(number)
            segment = _Segment([record for record in records if isinstance(record, Event)])
            segment.fold(self._header, state)
            self._segments[number] = segment
            if len(self._segments) > _MOST_SEGMENTS:
                self._segments.popitem(last=False)
        self._segments.move_to_end(number)
        return self._segments[number]
