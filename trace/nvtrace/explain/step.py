"""The chain of one step: why it had this batch, and why it took this long.

    step 176   decode [0 1]          0 ends: eos
    step 177   decode [1]            Left: 0, since it ended in step 176

Requests that decode are compared with those of the last step that decoded. `pace.py` compares the
times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvtrace import events as ev
from nvtrace.envelope import Header
from nvtrace.explain import links
from nvtrace.explain.origins import (
    BlockOrigins,
    EventErrors,
    NotInTraceError,
    given_back,
    idle_reason,
    rows_of,
    whole_need,
)
from nvtrace.explain.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nvtrace.envelope import Record


def explain_step(records: Iterable[Record], step: int) -> links.StepStory:
    """Explain one step.

    Args:
        records: what `read_trace` yields. All are read, since the step's time is compared with the
            other steps'.
        step: its engine_step.

    Raises:
        NotInTraceError: no such step.
        InconsistentTraceError: an event cannot follow from those before it.
    """
    watch, pace = _Watch(step), Pace(step)
    first = last = 0
    replay: ev.CudagraphReplay | None = None
    for record in records:
        if not isinstance(record, ev.Event):
            watch.is_led |= isinstance(record, Header) and record.rank > 0
            continue
        watch.take(record)
        if record.step is not None:
            first, last = first or record.step, record.step
        if isinstance(record, ev.CudagraphReplay):
            replay = record
        elif isinstance(record, ev.StepEnd):
            pace.take(record, replay if replay and replay.step == record.step else None)
    if not watch.events:
        extent = f"it has steps {first} to {last}" if last else "it has none"
        raise NotInTraceError(f"no step {step} in the trace: {extent}")
    with EventErrors(watch.events[-1]):
        return links.StepStory(step=step, chain=tuple(_chain(watch, pace.verdict())))


@dataclass(frozen=True, slots=True)
class _Change:
    """Why a request is, or is not, decoded: the reason, the step and the event of the change."""

    reason: str
    step: int
    event_id: int


@dataclass(slots=True)
class _Before:
    """The last step that decoded, and what has changed since then."""

    schedule: ev.Schedule | None = None
    gone: dict[int, _Change] = field(default_factory=dict)
    ready: dict[int, _Change] = field(default_factory=dict)  # prompts that are computed


class _Watch:
    """Takes in a trace up to the end of one step.

    Attributes:
        before: the last step before it that decoded.
        running: the running queue after the decision.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.before = _Before()
        self.running: list[int] = []
        self.num_ranks = 1
        self.is_led = False  # a rank above 0 records only what it computed
        self.replay_before: ev.CudagraphReplay | None = None  # of the step before, if it had one
        self.num_prefill_tokens: dict[int, int] = {}  # of the requests preempted in it
        self.given_back: dict[int, dict[str, Any]] = {}  # of the same: fields of their links
        self.whole: int | None = None  # what its stop's request would need without the cache
        self._fold = BlockOrigins()
        self._is_past = False

    @property
    def events(self) -> list[ev.Event]:
        """The events of the step; none before it has begun."""
        return self._fold.step.events if self._fold.step.index == self.step else []

    @property
    def arrivals(self) -> list[ev.RequestEnqueue]:
        """Requests that arrived since the step before."""
        return [e for e in self._fold.step.before if isinstance(e, ev.RequestEnqueue)]

    def take(self, event: ev.AnyEvent) -> None:
        """Take in one event; ignored after the step.

        Raises:
            InconsistentTraceError: it cannot follow from those before it.
        """
        self._is_past |= bool(self.events) and self._fold.is_end(event)
        if self._is_past:
            return
        with EventErrors(event):
            self._fold.apply(event)
            if event.step == self.step:
                self._note_own(event)
            else:
                self._note_earlier(event)

    def _note_own(self, event: ev.AnyEvent) -> None:
        if isinstance(event, ev.Schedule):
            self.running = list(self._fold.state.running)
        elif isinstance(event, ev.Preempt):
            sequence = self._fold.state.sequences[event.seq_id]
            self.num_prefill_tokens[event.seq_id] = sequence.num_prefill_tokens
            released = self._fold.released.get(event.seq_id)
            self.given_back[event.seq_id] = given_back(event, released)
            self._note_change(event)
        elif isinstance(event, ev.AdmissionStop):
            self.whole = whole_need(event, self._fold.state)

    def _note_earlier(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.EngineInit():
                self.num_ranks = event.tp_size
            case ev.CudagraphReplay():
                self.replay_before = event
            case ev.RunEager():
                self.replay_before = None
            case ev.ScheduleDecode():
                self.before = _Before(event)
            case ev.ScheduleMixed():
                self.before = _Before(event)
                self._note_prompts(event)
            case ev.SchedulePrefill():
                self._note_prompts(event)
            case _:
                self._note_change(event)

    def _note_prompts(self, event: ev.SchedulePrefill | ev.ScheduleMixed) -> None:
        """Note the requests whose prompt is complete after this step; they can decode next."""
        _, prefill_ids = rows_of(event)
        for row, seq_id in enumerate(event.seq_ids):
            sequence = self._fold.state.sequences[seq_id]
            end = event.num_computed_tokens[row] + event.num_scheduled_tokens[row]
            if seq_id in prefill_ids and end >= sequence.num_prefill_tokens:
                is_again = sequence.num_prefill_tokens > sequence.prompt_len
                reason = "recomputed" if is_again else "prefilled"
                self.before.ready[seq_id] = _Change(reason, self._fold.step.index, event.event_id)

    def _note_change(self, event: ev.AnyEvent) -> None:
        step = self._fold.step.index
        match event:
            case ev.Preempt():
                self.before.gone[event.seq_id] = _Change("preempted", step, event.event_id)
            case ev.StateTransition() if event.status == "FINISHED":
                self.before.gone[event.seq_id] = _Change(event.reason, step, event.event_id)
            case ev.EngineReset():
                change = _Change("aborted", step, event.event_id)
                self.before.gone |= dict.fromkeys(event.seq_ids, change)


# -- links -----------------------------------------------------------------------------------------


def _chain(watch: _Watch, paced: links.Paced | None) -> Iterator[links.AnyStep]:
    """Arrivals; the batch; preemptions, the stop, how it ran; ends; the time."""
    if watch.arrivals:
        seq_ids = tuple(event.seq_id for event in watch.arrivals)
        yield links.Came(**_place(watch, watch.arrivals), seq_ids=seq_ids)
    for event in watch.events:
        if isinstance(event, ev.Schedule):
            yield from _decision(watch, event)
    for event in watch.events:
        yield from _fact(watch, event)
    yield from _ends(watch)
    if paced is not None:
        yield paced
        return
    if watch.is_led and not any(isinstance(e, ev.Schedule) for e in watch.events):
        return
    errors = [event for event in watch.events if isinstance(event, ev.EngineError)]
    yield links.Broken(**_place(watch, errors), error=errors[0].error_type if errors else None)


def _fact(watch: _Watch, event: ev.Event) -> Iterator[links.AnyStep]:
    """The link of a single event."""
    place = _place(watch, [event])
    match event:
        case ev.Preempt():
            num_prefill_tokens = watch.num_prefill_tokens[event.seq_id]
            yield links.Preempted(
                **place,
                seq_id=event.seq_id,
                for_seq_id=event.for_seq_id,
                **watch.given_back[event.seq_id],
                num_tokens_to_recompute=event.num_tokens_to_recompute,
                is_prefilling=event.num_tokens_to_recompute < num_prefill_tokens,
            )
        case ev.AdmissionStop():
            yield links.Stopped(
                **place,
                head_seq_id=event.seq_id,
                reason=event.reason,
                need=event.need,
                have=event.have,
                whole=watch.whole,
                num_waiting=event.waiting_len,
            )
        case ev.RunEager():
            yield links.Eager(**place, reason=event.reason, num_tokens=event.num_tokens)
        case ev.CudagraphReplay():
            yield links.Replayed(
                **place,
                batch_size=event.batch_size,
                graph_batch_size=event.graph_batch_size,
                padding=event.padding,
                is_ahead=event.is_ahead,
                late_reason=None if event.is_ahead else _late_reason(watch, event),
            )


def _late_reason(watch: _Watch, event: ev.CudagraphReplay) -> links.LateReason:
    """Why the engine did not run ahead with this decode."""
    if watch.num_ranks > 1:
        return "ranks"
    if watch.replay_before is None:
        return "first"
    if watch.replay_before.graph_batch_size != event.graph_batch_size:
        return "other_graph"
    is_waiting = any(isinstance(own, ev.AdmissionStop) for own in watch.events)
    return "waiting" if is_waiting or watch.arrivals else "unforeseen"


def _decision(watch: _Watch, schedule: ev.Schedule) -> Iterator[links.AnyStep]:
    """The batch, and how it differs from the last step that decoded."""
    decode_ids, prefill_ids = rows_of(schedule)
    place = _place(watch, [schedule])
    yield links.Chosen(**place, phase=schedule.phase, reason=schedule.reason)
    before = watch.before.schedule if decode_ids else None
    before_ids = [] if before is None else rows_of(before)[0]
    num_tokens, num_cached = len(decode_ids), 0
    if not isinstance(schedule, ev.ScheduleDecode):
        num_tokens, num_cached = schedule.num_batched_tokens, sum(_cached_now(schedule))
    yield links.Computed(
        **place,
        decode_ids=tuple(decode_ids),
        prefill_ids=tuple(prefill_ids),
        num_tokens=num_tokens,
        token_budget=schedule.token_budget,
        num_cached_tokens=num_cached,
        num_waiting=schedule.waiting_len,
        num_running=schedule.running_len,
        before_step=None if before is None else before.engine_step,
        before_batch=None if before is None else len(before_ids),
    )
    if before is not None:
        yield from _changes(watch, before_ids, schedule)
    in_batch = set(schedule.seq_ids)
    aside = tuple(seq_id for seq_id in watch.running if seq_id not in in_batch)
    if aside:
        yield links.Aside(**place, seq_ids=aside, reason=idle_reason(schedule))


def _cached_now(schedule: ev.SchedulePrefill | ev.ScheduleMixed) -> Iterator[int]:
    """Cached tokens of the requests admitted now: only their cached tokens are computed."""
    rows = zip(schedule.num_cached_tokens, schedule.num_computed_tokens, strict=True)
    return (num_cached for num_cached, num_computed in rows if num_cached == num_computed)


def _changes(watch: _Watch, before: list[int], schedule: ev.Schedule) -> Iterator[links.AnyStep]:
    """Requests that left or joined the batch, grouped by reason."""
    now = rows_of(schedule)[0]
    is_now, was_before = set(now), set(before)
    no_budget = _Change("token_budget", watch.step, schedule.event_id)
    left = [(seq_id, watch.before.gone) for seq_id in before if seq_id not in is_now]
    joined = [(seq_id, watch.before.ready) for seq_id in now if seq_id not in was_before]
    for cls, moved in ((links.Left, left), (links.Joined, joined)):
        groups: dict[_Change, list[int]] = {}
        for seq_id, changes in moved:
            groups.setdefault(changes.get(seq_id, no_budget), []).append(seq_id)
        for change, seq_ids in groups.items():
            yield cls(
                first_step=change.step,
                last_step=change.step,
                event_ids=(change.event_id,),
                seq_ids=tuple(seq_ids),
                reason=change.reason,
            )


def _ends(watch: _Watch) -> Iterator[links.Finished]:
    """Requests that ended in the step, grouped by reason."""
    groups: dict[str, list[ev.AnyEvent]] = {}
    seq_ids: dict[str, list[int]] = {}
    for event in watch.events:
        match event:
            case ev.StateTransition() if event.status == "FINISHED":
                groups.setdefault(event.reason, []).append(event)
                seq_ids.setdefault(event.reason, []).append(event.seq_id)
            case ev.EngineReset():
                groups.setdefault("aborted", []).append(event)
                seq_ids.setdefault("aborted", []).extend(event.seq_ids)
    for reason, events in groups.items():
        place = _place(watch, events)
        yield links.Finished(**place, seq_ids=tuple(seq_ids[reason]), reason=reason)


def _place(watch: _Watch, events: Iterable[ev.Event]) -> dict[str, Any]:
    """The common fields of a link about the step, with the events that prove it."""
    event_ids = tuple(event.event_id for event in events)
    return {"first_step": watch.step, "last_step": watch.step, "event_ids": event_ids}
