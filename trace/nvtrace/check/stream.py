"""Rules for the order of events: numbers, times, steps, phases, names, and what follows what."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from nvtrace import events as ev
from nvtrace.check import fields
from nvtrace.check.finding import Conflict, Fact, Rule, differ

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvtrace.check.ledger import Ledger
    from nvtrace.envelope import Footer

_FAILURES = (ev.EngineError, ev.EngineReset)
_BETWEEN_STEPS = (
    *(ev.EngineInit, ev.TpRuntimeInit, ev.ModelWeightsLoaded, ev.WarmupModel, ev.KvBudgetEstimate),
    *(ev.CudagraphCapture, ev.CudagraphSkip, ev.EngineReady),
    *(ev.GenerateStart, ev.RequestEnqueue, ev.RequestRefused, ev.RequestAbort),
    *(ev.RequestOutput, ev.GenerateFinish),
)
_SCHEDULING = (
    *(ev.BlocksShare, ev.BlocksRevive, ev.BlocksAllocate, ev.BlocksAppend),
    *(ev.AdmissionStop, ev.Preempt),
)
# What must come right after; an exception (ENGINE_ERROR) may come instead.
_NEXT: dict[type, tuple[type, ...]] = {
    ev.BlocksShare: (ev.BlocksRevive, ev.BlocksEvict, ev.BlocksAllocate),
    ev.BlocksRevive: (ev.BlocksShare, ev.BlocksEvict, ev.BlocksAllocate),
    ev.BlocksEvict: (ev.BlocksAllocate, ev.BlocksAppend),
    ev.BlocksAllocate: (ev.StateTransition,),
    ev.BlocksRelease: (ev.Preempt, ev.StateTransition),
    ev.Preempt: (ev.StateTransition,),
    ev.RequestAbort: (ev.BlocksRelease, ev.StateTransition),
    ev.SchedulePrefill: (ev.PreparePrefillTensors,),
    ev.ScheduleMixed: (ev.PreparePrefillTensors,),
    ev.ScheduleDecode: (ev.PrepareDecodeTensors,),
    ev.PreparePrefillTensors: ev.RUNS,
    ev.PrepareDecodeTensors: ev.RUNS,
    ev.EngineError: (ev.EngineReset,),
}
# What must come right before.
_PREVIOUS: dict[type, tuple[type, ...]] = {
    ev.Preempt: (ev.BlocksRelease,),
    ev.StateTransition: (ev.BlocksAllocate, ev.BlocksRelease, ev.Preempt, ev.RequestAbort),
    ev.PreparePrefillTensors: ev.SCHEDULES,
    ev.PrepareDecodeTensors: ev.SCHEDULES,
    ev.RunEager: ev.LAYOUTS,
    ev.CudagraphReplay: ev.LAYOUTS,
    ev.SampleTokens: ev.RUNS,
    ev.BlocksHash: (*ev.RUNS, ev.SampleTokens),
    ev.EngineReset: (ev.EngineError,),
}
_PHASES: dict[type, ev.Phase] = {
    **dict.fromkeys(_BETWEEN_STEPS, "init"),
    ev.EngineInit: "bootstrap",
    **dict.fromkeys((ev.GenerateStart, ev.RequestEnqueue), "ingress"),
    **dict.fromkeys((ev.RequestRefused, ev.RequestAbort), "ingress"),
    **dict.fromkeys((ev.RequestOutput, ev.GenerateFinish), "egress"),
    **dict.fromkeys((ev.SchedulePrefill, ev.PreparePrefillTensors), "prefill"),
    **dict.fromkeys((ev.ScheduleDecode, ev.PrepareDecodeTensors), "decode"),
    ev.ScheduleMixed: "mixed",
    **dict.fromkeys((ev.StateTransition, ev.BlocksHash, ev.StepEnd, *_FAILURES), "postprocess"),
}
_PARALLEL = (
    *("block_ids", "hashes", "freed", "temperatures", "token_ids", "num_tokens"),
    *("num_scheduled_tokens", "num_computed_tokens", "num_cached_tokens"),
)
_NEED_AN_ENGINE = (*_BETWEEN_STEPS[8:], *_SCHEDULING, *ev.SCHEDULES)


def _count(ledger: Ledger, record: Footer) -> Iterator[Conflict]:
    """The footer's event_id and count are those of the events before it."""
    yield from differ("event_id", record.event_id, "next_event_id", ledger.last_id + 1)
    yield from differ("num_events", record.num_events, "last_event_id", ledger.last_id)


def _exit(ledger: Ledger, record: Footer) -> Iterator[Conflict]:
    """A run that is "ok" finished its steps and outputs; any other had an exception.

    A caller of step() may stop while requests are unfinished. A generate() ends them all.
    """
    recorded = Fact("exit", record.exit)
    unfinished = [*ledger.state.waiting, *ledger.state.running]
    left = [*ledger.outputs_due]
    if ledger.call is not None:
        left += [seq_id for seq_id in unfinished if seq_id <= ledger.call.last_prompt]
    if record.exit == "ok":
        if record.error_type is not None:
            yield Conflict(recorded, Fact("error_type", record.error_type))
        elif left:
            yield Conflict(recorded, Fact("unfinished", left))
        elif ledger.step is not None:
            yield Conflict(recorded, Fact("step_under_way", ledger.step.index))
    if record.exit not in {"error", "interrupted"}:  # an unknown word is not checked
        return
    is_started = ledger.ready is not None or isinstance(ledger.last, ev.RUNS)  # (a rank above 0)
    is_refused = isinstance(ledger.last, ev.RequestRefused)  # which raises
    is_simulated = ledger.header is not None and ledger.header.mode == "simulated"  # it may stop
    is_explained = ledger.has_failed or is_refused or not is_started or is_simulated or unfinished
    if record.error_type is None and not (is_explained or left):
        yield Conflict(recorded, Fact("error_type", record.error_type))


def _numbers(ledger: Ledger, event: ev.Event) -> Iterator[Conflict]:
    yield from differ("event_id", event.event_id, "next_event_id", ledger.last_id + 1)


def _times(ledger: Ledger, event: ev.Event) -> Iterator[Conflict]:
    earliest = ledger.last.ts_ns if ledger.last else 0
    if event.ts_ns < earliest:
        yield Conflict(Fact("ts_ns", event.ts_ns), Fact("time_before", earliest))


def _step_numbers(ledger: Ledger, event: ev.Event) -> Iterator[Conflict]:
    if not ledger.is_whole and not isinstance(event, ev.EngineInit):
        return
    under_way = None if ledger.step is None else ledger.step.index
    coming = ledger.last_step + 1
    if ledger.is_reset and event.step is not None:  # the error may have come before the first event
        coming = max(coming, event.step)
    if isinstance(event, ev.EngineReset) and isinstance(ledger.last, ev.EngineError):
        allowed = [ledger.last.step]
    elif isinstance(event, _FAILURES):
        allowed = [None, ledger.last_step, coming]
    elif isinstance(event, _BETWEEN_STEPS):
        allowed = [None]
        yield from differ("event", ev.tag_of(event), "step_under_way", _unless(event, under_way))
    elif under_way is not None:
        allowed = [under_way]
    elif isinstance(event, ev.StateTransition | ev.BlocksRelease):
        allowed = [None] if _is_abort(ledger) else [coming]
    elif isinstance(event, ev.BlocksEvict) and event.reason == "cache_reset":
        allowed = [None]
    else:
        allowed = [coming]
    if event.step not in allowed:
        yield Conflict(Fact("step", event.step), Fact("step_under_way", allowed[0]))


def _unless(event: ev.Event, under_way: int | None) -> object:
    return ev.tag_of(event) if under_way is None else under_way


def _is_abort(ledger: Ledger) -> bool:
    """Was the event before part of an abort between two steps?"""
    last = ledger.last
    return isinstance(last, ev.RequestAbort) or (
        isinstance(last, ev.BlocksRelease) and last.step is None
    )


def _phases(ledger: Ledger, event: ev.Event) -> Iterator[Conflict]:
    expected = _phase(event)
    step = ledger.step
    if expected is None and step is not None and step.schedule is not None:
        expected = "postprocess" if isinstance(event, ev.BlocksRelease) else step.phase
    if expected is None and event.step is None:
        expected = "postprocess"  # blocks that an abort gives back
    if expected is not None:
        yield from differ("phase", event.phase, "phase_of_event", expected)
    if isinstance(event, ev.SCHEDULES) and step is not None:
        early = {other.phase for other in step.early if _phase(other) is None}
        yield from differ("phase", sorted({expected, *early}, key=str), "phase_of_step", [expected])


def _phase(event: ev.Event) -> ev.Phase | None:
    """The phase of an event; None if it is that of the step's batch."""
    match event:
        case ev.BlocksEvict(reason="cache_reset"):
            return "ingress"
        case ev.StateTransition(reason="admitted" | "preempted"):
            return None
    return _PHASES.get(type(event))


def _order(ledger: Ledger, event: ev.Event) -> Iterator[Conflict]:
    tag, last = Fact("event", ev.tag_of(event)), ledger.last
    is_failure = isinstance(event, ev.EngineError)  # it may come anywhere, but only once
    if not ledger.is_whole or (is_failure and not isinstance(last, ev.EngineError)):
        return
    after = () if last is None or _is_cache_reset(last) else _NEXT.get(type(last), ())
    if after and not isinstance(event, after):
        yield Conflict(tag, Fact("must_follow", _tags(after)))
    before = _PREVIOUS.get(type(event), ())
    if before and not isinstance(last, before):
        yield Conflict(tag, Fact("must_precede", _tags(before)))
    if isinstance(event, _NEED_AN_ENGINE) and ledger.ready is None:
        yield Conflict(tag, Fact("must_precede", [ev.tag_of(ev.EngineReady)]))
    yield from _order_in_step(ledger, event, tag)


def _order_in_step(ledger: Ledger, event: ev.Event, tag: Fact) -> Iterator[Conflict]:
    step = ledger.step
    schedule = None if step is None else step.schedule
    is_early = isinstance(event, (*_SCHEDULING, *ev.SCHEDULES))
    if is_early and schedule is not None:
        yield Conflict(tag, Fact("already_scheduled", ev.tag_of(schedule)))
    if isinstance(event, ev.StepEnd):
        missing = [kind for kind in _missing(ledger) if kind]
        yield from differ("event", ev.tag_of(event), "must_precede", missing or ev.tag_of(event))
    is_next = step is None and event.step is not None and not isinstance(event, _FAILURES)
    if (is_next or isinstance(event, ev.GenerateFinish)) and ledger.outputs_due:
        yield Conflict(tag, Fact("outputs_due", ledger.outputs_due[:]))


def _missing(ledger: Ledger) -> list[str]:
    """The events that are missing before a step's end."""
    step = ledger.step
    if step is None or step.run is None:
        return [ev.tag_of(ev.RunEager)]
    is_due = bool(step.sampled) and step.sample is None
    return [ev.tag_of(ev.SampleTokens)] if is_due else []


def _is_cache_reset(event: ev.Event) -> bool:
    return isinstance(event, ev.BlocksEvict) and event.reason != "page_needed"


def _tags(types: tuple[type, ...]) -> list[str]:
    return [ev.tag_of(cls) for cls in types if issubclass(cls, ev.Event)]


def names(ledger: Ledger, event: ev.Event) -> Iterator[Conflict]:
    """Every request and block that an event names exists, and its lists have the same length.

    If not, most other rules cannot be applied.
    """
    if not isinstance(event, ev.RequestEnqueue | ev.EngineReset):
        for field in ("seq_id", "for_seq_id", "seq_ids", "finished"):
            value = getattr(event, field, [])
            named = value if isinstance(value, list) else [value]
            unknown = [seq_id for seq_id in named if seq_id not in ledger.state.sequences]
            if unknown:
                yield Conflict(Fact(field, unknown[0]), Fact("requests", sorted(ledger.requests)))
            if len(set(named)) < len(named):
                yield Conflict(Fact(field, named), Fact("each_once", sorted(set(named))))
    for field in ("block_ids", "freed"):
        blocks = _flat(getattr(event, field, []))
        outside = [block for block in blocks if not 0 <= block < ledger.state.num_blocks]
        if outside:
            yield Conflict(Fact(field, outside[0]), Fact("num_blocks", ledger.state.num_blocks))
    yield from _lengths(event)


def _lengths(event: ev.Event) -> Iterator[Conflict]:
    seq_ids = getattr(event, "seq_ids", None)
    for field in _PARALLEL:
        values = getattr(event, field, None)
        if values is not None and seq_ids is not None:
            yield from differ(f"len({field})", len(values), "num_seq_ids", len(seq_ids))
    if isinstance(event, ev.BlocksHash | ev.BlocksEvict):
        num_pages, num_hashes = len(_flat(event.block_ids)), len(_flat(event.hashes))
        yield from differ("len(hashes)", num_hashes, "num_pages", num_pages)
    for field in ("seq_ids", "block_ids"):
        values = getattr(event, field, None)
        is_empty = values is not None and (not values or [] in values)
        if is_empty and not isinstance(event, ev.EngineReset):
            yield Conflict(Fact(field, values), Fact("not_empty", 1))


def _flat(values: list[Any]) -> list[Any]:
    """A list, or the lists in it, as one."""
    return [*chain.from_iterable(v if isinstance(v, list) else [v] for v in values)]


OF_FOOTER = (("ranges", fields.in_range), ("event_ids", _count), ("exit", _exit))
RULES = (
    Rule("event_ids", "before", (), _numbers),
    Rule("times", "before", (), _times),
    Rule("steps", "before", (), _step_numbers),
    Rule("phases", "before", (), _phases),
    Rule("order", "before", (), _order),
)
