"""Perfetto: a trace as a timeline, for ui.perfetto.dev and chrome://tracing.

    engine     steps      [ step 7 decode                                  ]
                          [schedule][prepare][   forward  ][sample][postpr.]
               GPU                            [   decode         ]
               startup    [ENGINE_READY [MODEL_WEIGHTS_LOADED] ...          ]
               counters   running requests, waiting requests, free blocks, batched tokens
    requests   request 0  [ request 0                                      ]
                          [waiting][ prefill         ][ decode ][preempted]...
                                   [0..512][512..700]

Arrows: from a wait to the steps that compute its prefill, chunk by chunk; and from the moment a
request is preempted to its resumption. A GPU slice's length is measured; its place is not: it
begins with its launch, or when the GPU is done with the step before.

One rank's trace makes one timeline, with the trace's own times. `trace_events.py` has the format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

from nvtrace import events as ev
from nvtrace.envelope import Header
from nvtrace.export import json_text
from nvtrace.export.trace_events import TraceEvents, Track
from nvtrace.source import calls_of, hook_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nvtrace.envelope import Record

_ENGINE, _REQUESTS = 1, 2  # processes
# No thread has the number of a process: Perfetto would take it for the main thread, put it first,
# and call it so. Thread 0 it takes for that too. A thread's number has 31 bits.
_STEPS, _GPU, _STARTUP = Track(_ENGINE, 11), Track(_ENGINE, 12), Track(_ENGINE, 13)
_FIRST_REQUEST = 1000
_NUM_REQUESTS = 2**31 - _FIRST_REQUEST
_LONGEST_ARGUMENT = 200
_STARTUP_PARTS = (ev.ModelWeightsLoaded, ev.WarmupModel, ev.CudagraphCapture)


def lines(records: Iterable[Record]) -> Iterator[str]:
    """One JSON document, an event a line.

    Args:
        records: what `read_trace` yields.
    """
    timeline = PerfettoTimeline()
    separator = ""
    for record in records:
        if isinstance(record, Header):
            facts = {"run_id": record.run_id, "created": record.created, "rank": record.rank}
            about = {"otherData": facts, "displayTimeUnit": "ms"}
            yield json_text(about)[:-1] + ',"traceEvents":['
        for event in timeline.take(record):
            yield separator + json_text(event)
            separator = ","
    for event in timeline.finish():
        yield separator + json_text(event)
        separator = ","
    yield "]}"


@dataclass(slots=True)
class _Request:
    """A request that has not ended.

    Attributes:
        phase: the slice that is open inside its own; None for none.
        num_tokens: its length; all of it is to be prefilled.
        wait_flow: the arrow from its last wait to the chunks.
        resume_flow: the arrow from its last preemption.
        has_chunk: is the slice of a chunk open?
        is_prefilled: was its last chunk computed in this step?
        ending: why it ends with this step.
    """

    track: Track
    num_tokens: int
    phase: str | None = None
    wait_flow: int = 0
    resume_flow: int | None = None
    has_chunk: bool = False
    is_prefilled: bool = False
    ending: ev.StateTransition | None = None


@dataclass(slots=True)
class _Step:
    """The step under way: what is drawn at its STEP_END.

    (`replay.StepFold` would give it only when the next event comes, and only of a sound trace.)
    """

    index: int
    start_ns: int
    schedule: ev.Schedule | None = None
    parts: dict[str, ev.Event] = field(default_factory=dict)  # part -> its event
    moments: list[tuple[int, ev.Event]] = field(default_factory=list)  # (time, event)
    preempted: list[tuple[int, int]] = field(default_factory=list)  # (time, arrow)
    chunks: list[tuple[int, bool]] = field(default_factory=list)  # (arrow, is it the last chunk?)


class PerfettoTimeline:
    """Builds the timeline, record by record."""

    def __init__(self) -> None:
        self._out = TraceEvents()
        self._sources: dict[str, str] = {}
        self._requests: dict[int, _Request] = {}
        self._flows = count(1)
        self._startup: list[tuple[int, int, ev.Event]] = []  # (its start, its end, event)
        self._step: _Step | None = None
        self._now = self._last_step_end = self._gpu_end = 0
        self._out.name_process(_ENGINE, "engine")
        self._out.name_process(_REQUESTS, "requests")
        for track, name in ((_STEPS, "steps"), (_GPU, "GPU"), (_STARTUP, "startup")):
            self._out.name_track(track, 0, name)

    def take(self, record: Record) -> Iterator[dict[str, Any]]:
        """Take in one record. Yields the trace events before which no other can come any more."""
        if not isinstance(record, ev.Event):
            return
        self._now = max(self._now, record.ts_ns)
        if self._step is not None and record.step != self._step.index:
            yield from self._end_step(self._step)  # an error ended it
        if record.step is not None and self._step is None:
            self._step = _Step(record.step, self._now)
        handler = self._handlers.get(type(record))
        if handler is not None:
            handler(self, record)
        if isinstance(record, ev.StepEnd) and self._step is not None:
            yield from self._end_step(self._step, record)

    def finish(self) -> Iterator[dict[str, Any]]:
        """End all open slices at the end of the trace."""
        if self._step is not None:
            yield from self._end_step(self._step)
        if self._startup:
            self._draw_startup(None)
        for seq_id in [*self._requests]:
            self._end_request(seq_id, {"finish_reason": None, "is_unfinished": True})
        yield from self._out.until(float("inf"))

    # -- startup ---------------------------------------------------------------------------------

    def _startup_part(self, event: Any) -> None:  # noqa: ANN401 - those that have a duration
        self._startup.append((self._now - event.duration_ns, self._now, event))

    def _engine_ready(self, event: ev.EngineReady) -> None:
        self._draw_startup(event)

    def _draw_startup(self, ready: ev.EngineReady | None) -> None:
        floor = self._last_step_end
        if ready is not None:
            starts = [self._now - ready.duration_ns, *(start for start, _, _ in self._startup)]
            floor = max(floor, min(starts))
            self._begin(_STARTUP, floor, ready)
        for start, end, event in self._startup:
            self._begin(_STARTUP, max(floor, start), event)
            floor = max(floor, end)
            self._out.end(_STARTUP, floor)
        if ready is not None:
            self._out.end(_STARTUP, self._now)
        self._startup = []

    # -- requests --------------------------------------------------------------------------------

    def _request_enqueue(self, event: ev.RequestEnqueue) -> None:
        if event.seq_id in self._requests:
            self._end_request(event.seq_id, {"is_unfinished": True})
        track = _request_track(event.seq_id)
        request = self._requests[event.seq_id] = _Request(track, event.prompt_len)
        self._out.name_track(track, self._now, f"request {event.seq_id}")
        arguments = self._arguments(event) | {"stop": _argument(event.stop)}
        self._out.begin(track, self._now, f"request {event.seq_id}", arguments)
        self._wait(request, "waiting", event)

    def _wait(self, request: _Request, phase: str, event: ev.Event) -> None:
        """It is in the waiting queue from now on; arrows start here."""
        self._begin_phase(request, phase, event)
        request.wait_flow = next(self._flows)
        self._out.flow("s", request.wait_flow, request.track, self._now, "prefill")

    def _begin_phase(self, request: _Request, phase: str, event: ev.Event) -> None:
        if request.phase is not None:
            self._out.end(request.track, self._now)
        request.phase = phase
        self._out.begin(request.track, self._now, phase, self._arguments(event))

    def _state_transition(self, event: ev.StateTransition) -> None:
        request = self._requests.get(event.seq_id)
        if request is None:
            return
        if event.status == "RUNNING":
            self._begin_phase(request, "prefill", event)
            if request.resume_flow is not None:
                self._out.flow("f", request.resume_flow, request.track, self._now, "resume")
                request.resume_flow = None
        elif event.status == "WAITING":
            self._wait(request, "preempted", event)
        elif event.status != "FINISHED":
            self._begin_phase(request, event.status, event)
        elif self._step is None:
            self._end_request(event.seq_id, self._arguments(event))
        else:
            request.ending = event

    def _preempt(self, event: ev.Preempt) -> None:
        self._moment(event)
        request = self._requests.get(event.seq_id)
        if request is not None and self._step is not None:
            request.resume_flow = next(self._flows)
            self._step.preempted.append((self._now, request.resume_flow))

    def _request_output(self, event: ev.RequestOutput) -> None:
        arguments = self._arguments(event) | {"text": event.text}
        self._out.instant(_request_track(event.seq_id), self._now, ev.tag_of(event), arguments)

    def _engine_reset(self, event: ev.EngineReset) -> None:
        self._moment(event)
        for seq_id in event.seq_ids:
            if seq_id in self._requests:
                self._end_request(seq_id, {"finish_reason": "aborted"})

    def _end_request(self, seq_id: int, arguments: dict[str, Any]) -> None:
        request = self._requests.pop(seq_id)
        self._end_chunk(request)
        if request.phase is not None:
            self._out.end(request.track, self._now)
        self._out.end(request.track, self._now, arguments)

    def _end_chunk(self, request: _Request) -> None:
        if request.has_chunk:
            request.has_chunk = False
            self._out.end(request.track, self._now)

    # -- a step ----------------------------------------------------------------------------------

    def _schedule(self, event: ev.Schedule) -> None:
        if self._step is not None:
            self._step.schedule = event
        self._count(event, getattr(event, "num_batched_tokens", event.scheduled))
        if isinstance(event, ev.ScheduleDecode):
            return
        for seq_id, num_tokens, num_computed in zip(
            event.seq_ids, event.num_scheduled_tokens, event.num_computed_tokens, strict=False
        ):
            request = self._requests.get(seq_id)
            if request is not None and request.phase == "prefill":
                self._begin_chunk(request, event, num_computed, num_computed + num_tokens)

    def _begin_chunk(self, request: _Request, event: ev.Event, first: int, after: int) -> None:
        request.has_chunk, request.is_prefilled = True, after >= request.num_tokens
        arguments = {"num_tokens": after - first, "step": event.step}
        self._out.begin(request.track, self._now, f"tokens {first}..{after}", arguments)
        if self._step is not None:
            self._step.chunks.append((request.wait_flow, request.is_prefilled))

    def _count(self, event: ev.Schedule | ev.StepEnd, num_batched_tokens: int) -> None:
        numbers = (
            ("running", "requests", event.running_len),
            ("waiting", "requests", event.waiting_len),
            ("free", "blocks", event.free_blocks),
            ("batched", "tokens", num_batched_tokens),
        )
        for name, what, value in numbers:
            self._out.counter(_ENGINE, self._now, name, what, value)

    def _part(self, event: ev.Event) -> None:
        if self._step is not None:
            self._step.parts[self._part_names[type(event)]] = event

    def _sample_tokens(self, event: ev.SampleTokens) -> None:
        self._part(event)
        for seq_id in event.seq_ids:
            if seq_id in self._requests:
                self._requests[seq_id].num_tokens += 1

    def _moment(self, event: ev.Event) -> None:
        if self._step is not None:
            self._step.moments.append((self._now, event))
        else:
            self._instant(self._now, event)

    def _end_step(self, step: _Step, end: ev.StepEnd | None = None) -> Iterator[dict[str, Any]]:
        """Draw the step, whose times are now known; without a STEP_END, as far as it got."""
        self._step = None
        start = step.start_ns
        if end is not None:
            start = max(self._now - max(end.wall_ns, 0), self._last_step_end)
        # A rank that does not schedule records no STEP_END.
        run = step.parts.get("forward") if step.schedule is None else None
        kind = end.batch_phase if end is not None else run.phase if run else "cut short"
        self._out.begin(_STEPS, start, f"step {step.index} {kind}", self._step_arguments(step, end))
        if end is None:
            self._draw_moments(step, start)
        else:
            self._draw_parts(step, end, start)
            self._count(end, end.num_batched_tokens)
        self._out.end(_STEPS, self._now)
        self._last_step_end = self._now
        for seq_id, request in [*self._requests.items()]:
            self._end_chunk(request)
            if request.ending is not None:
                self._end_request(seq_id, self._arguments(request.ending))
            elif request.is_prefilled and end is not None:
                self._begin_phase(request, "decode", end)
            request.is_prefilled = False
        yield from self._out.until(self._now)

    def _draw_parts(self, step: _Step, end: ev.StepEnd, start: int) -> None:
        """Draw the parts of the step, one after another."""
        if step.schedule is not None:
            step.parts["schedule"] = step.schedule
        step.parts["postprocess"] = end
        for name in ("schedule", "prepare", "forward", "sample", "postprocess"):
            event = step.parts.get(name)
            arguments = {} if event is None else self._arguments(event)
            self._out.begin(_STEPS, start, name, arguments)
            if name == "schedule":
                self._draw_moments(step, start)
            if name == "forward":
                self._draw_forward(step, end, start)
            start = min(start + max(getattr(end, f"{name}_ns"), 0), self._now)
            self._out.end(_STEPS, start)

    def _draw_moments(self, step: _Step, start: int) -> None:
        for ts_ns, event in step.moments:
            self._instant(max(ts_ns, start), event)
        for ts_ns, flow_id in step.preempted:
            self._out.flow("s", flow_id, _STEPS, max(ts_ns, start), "resume")

    def _draw_forward(self, step: _Step, end: ev.StepEnd, start: int) -> None:
        """Draw the model's run: arrows to the chunks that it computes, and the GPU's slice."""
        for flow_id, is_last in step.chunks:
            self._out.flow("f" if is_last else "t", flow_id, _STEPS, start, "prefill")
        if end.gpu_ns is not None:
            begin = max(start, self._gpu_end)
            self._gpu_end = begin + end.gpu_ns
            self._out.begin(_GPU, begin, end.batch_phase, {"step": end.step, "ns": end.gpu_ns})
            self._out.end(_GPU, self._gpu_end)

    # -- arguments -------------------------------------------------------------------------------

    def _step_arguments(self, step: _Step, end: ev.StepEnd | None) -> dict[str, Any]:
        arguments: dict[str, Any] = {"step": step.index}
        if step.schedule is not None:
            arguments["seq_ids"] = _argument(step.schedule.seq_ids)
        if end is not None:
            arguments |= {"num_seqs": end.num_seqs, "num_batched_tokens": end.num_batched_tokens}
        return arguments

    def _begin(self, track: Track, ts_ns: int, event: ev.Event) -> None:
        self._out.begin(track, ts_ns, ev.tag_of(event), self._arguments(event))

    def _instant(self, ts_ns: int, event: ev.Event) -> None:
        self._out.instant(_STEPS, ts_ns, ev.tag_of(event), self._arguments(event))

    def _arguments(self, event: ev.Event) -> dict[str, Any]:
        """The arguments of a slice or instant: the event's fields, and its place in the source."""
        tag = ev.tag_of(event)
        names = ("reason", *event.log_fields) if hasattr(event, "reason") else event.log_fields
        facts = {name: _argument(getattr(event, name)) for name in names}
        if tag not in self._sources:
            self._sources[tag] = ", ".join(map(str, calls_of(hook_of(tag))))
        return {"event": tag, "event_id": event.event_id, **facts, "source": self._sources[tag]}

    _part_names: ClassVar[dict[type, str]] = {
        ev.PreparePrefillTensors: "prepare",
        ev.PrepareDecodeTensors: "prepare",
        ev.RunEager: "forward",
        ev.CudagraphReplay: "forward",
        ev.SampleTokens: "sample",
    }
    _handlers: ClassVar[dict[type, Callable[[PerfettoTimeline, Any], None]]] = {
        **dict.fromkeys(_STARTUP_PARTS, _startup_part),
        ev.EngineReady: _engine_ready,
        ev.RequestEnqueue: _request_enqueue,
        ev.StateTransition: _state_transition,
        ev.Preempt: _preempt,
        ev.RequestOutput: _request_output,
        ev.EngineReset: _engine_reset,
        **dict.fromkeys(ev.SCHEDULES, _schedule),
        **dict.fromkeys(_part_names, _part),
        ev.SampleTokens: _sample_tokens,
        **dict.fromkeys(
            (ev.AdmissionStop, ev.BlocksEvict, ev.EngineError, ev.RequestRefused), _moment
        ),
    }


def _request_track(seq_id: int) -> Track:
    return Track(_REQUESTS, _FIRST_REQUEST + seq_id % _NUM_REQUESTS)


def _argument(value: object) -> object:
    """A list as one short text: Perfetto would show each item as an argument of its own."""
    if not isinstance(value, list | tuple):
        return value
    text = json_text(value)
    return text if len(text) <= _LONGEST_ARGUMENT else f"{text[:_LONGEST_ARGUMENT]}..."
