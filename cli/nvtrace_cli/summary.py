"""A run in numbers: what a replay shows, worked out from a trace in one pass.

Knows steps and requests. Does not know words, tables or terminals (`views/`), and keeps no event
longer than it must, so that a long trace is summarized in little memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from nvtrace import events as ev
from nvtrace.envelope import Footer, Header
from nvtrace.replay import InconsistentTraceError, fold_steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nvtrace.envelope import Record
    from nvtrace.replay import Step


@dataclass(frozen=True, slots=True)
class PageCounts:
    """What a step did to the KV pages.

    Attributes:
        num_taken: empty pages given out.
        num_reused: pages found in the prefix cache.
        num_published: pages put into the prefix cache.
        num_evicted: pages that left the prefix cache to be used anew.
        num_freed: pages that nobody holds any more.
    """

    num_taken: int = 0
    num_reused: int = 0
    num_published: int = 0
    num_evicted: int = 0
    num_freed: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """One sequence's part of a step.

    Attributes:
        num_computed_before: tokens already in its pages.
        num_tokens: tokens computed now.
        num_total: tokens there are to compute (less than that so far: a chunk).
        num_prompt: how many of them are the prompt; the others were generated before a preemption.
        num_cached: tokens that came from the prefix cache, if it was admitted in this step.
    """

    seq_id: int
    num_computed_before: int
    num_tokens: int
    num_total: int
    num_prompt: int
    num_cached: int = 0

    @property
    def is_complete(self) -> bool:
        """Is everything computed after this step, so that a token is sampled?"""
        return self.num_computed_before + self.num_tokens >= self.num_total

    @property
    def is_continued(self) -> bool:
        """Was a part of it computed in an earlier step?"""
        return self.num_computed_before > self.num_cached

    @property
    def is_recompute(self) -> bool:
        """Is this a second time, after a preemption?"""
        return self.num_total > self.num_prompt


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One engine step.

    Queues and free pages are those after the decision, as in the step's SCHEDULE_* event;
    `waiting` and `running` are the queues at the step's end.
    """

    index: int
    phase: Literal["prefill", "decode"] | None  # None: the trace ends before the decision
    reason: str | None
    shares: tuple[Share, ...]
    num_batched_tokens: int
    waiting_len: int
    running_len: int
    free_blocks: int
    waiting: tuple[int, ...]
    running: tuple[int, ...]
    arrived: tuple[int, ...]
    admitted: tuple[int, ...]
    preempted: tuple[ev.Preempt, ...]
    finished: tuple[tuple[int, str], ...]  # (seq_id, reason)
    stop: ev.AdmissionStop | None
    error: ev.EngineError | None
    pages: PageCounts
    tags: frozenset[str]
    start_ns: int
    end_ns: int
    wall_ns: int | None  # None: the step did not end

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """The batch."""
        return tuple(share.seq_id for share in self.shares)


@dataclass(slots=True)
class RequestSummary:
    """One request, from its arrival to its end."""

    seq_id: int
    prompt_len: int
    max_tokens: int
    enqueued_ns: int
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    arrival_step: int | None = None  # the first step that could have taken it
    first_token_step: int | None = None
    first_token_ns: int | None = None
    end_step: int | None = None  # the last step before which or in which it was there
    reason: str | None = None  # None: it has not ended
    text: str | None = None


@dataclass(slots=True)
class RunSummary:
    """A whole trace."""

    header: Header
    init: ev.EngineInit | None = None
    budget: ev.KvBudgetEstimate | None = None
    weights: ev.ModelWeightsLoaded | None = None
    ready: ev.EngineReady | None = None
    footer: Footer | None = None
    num_events: int = 0
    requests: dict[int, RequestSummary] = field(default_factory=dict)
    refused: list[ev.RequestRefused] = field(default_factory=list)
    errors: list[ev.EngineError] = field(default_factory=list)
    steps: list[StepSummary] = field(default_factory=list)


def summarize(records: Iterable[Record]) -> RunSummary:
    """Fold a trace into its summary.

    Args:
        records: what `nvtrace.reader.read_trace` yields, the header first.

    Raises:
        InconsistentTraceError: an event cannot follow from those before it.
    """
    iterator = iter(records)
    header = next(iterator)
    if not isinstance(header, Header):
        raise TypeError("the first record of a trace is its header")
    run = RunSummary(header)
    try:
        for step in fold_steps(_watch(iterator, run)):
            if step.index:
                run.steps.append(_summarize_step(step, run))
            else:  # what came after the last step
                _note_between_steps(step.before, run)
    except KeyError as error:
        raise InconsistentTraceError(
            f"event {run.num_events} or one soon before it is about request {error}, which never "
            "arrived"
        ) from error
    return run


def _watch(records: Iterator[Record], run: RunSummary) -> Iterator[Record]:
    """Pass records on, and note those that say something of the run as a whole."""
    for record in records:
        match record:
            case ev.EngineInit():
                run.init = record
            case ev.KvBudgetEstimate():
                run.budget = record
            case ev.ModelWeightsLoaded():
                run.weights = record
            case ev.EngineReady():
                run.ready = record
            case ev.RequestRefused():
                run.refused.append(record)
            case ev.EngineError():
                run.errors.append(record)
            case Footer():
                run.footer = record
        if not isinstance(record, Header | Footer):
            run.num_events += 1
        yield record


def _note_between_steps(events: list[ev.Event], run: RunSummary) -> tuple[int, ...]:
    """Arrivals, outputs and aborts. Returns who arrived."""
    arrived = []
    for event in events:
        if isinstance(event, ev.RequestEnqueue):
            arrived.append(event.seq_id)
            run.requests[event.seq_id] = RequestSummary(
                event.seq_id, event.prompt_len, event.max_tokens, event.ts_ns
            )
        elif isinstance(event, ev.RequestOutput):
            run.requests[event.seq_id].text = event.text
        elif isinstance(event, ev.StateTransition):
            _note_end(event, run)
        elif isinstance(event, ev.EngineReset):
            _note_reset(event, run)
    return tuple(arrived)


def _note_end(event: ev.StateTransition, run: RunSummary) -> None:
    request = run.requests[event.seq_id]
    request.num_completion_tokens = event.num_completion_tokens
    if event.status == "FINISHED":
        request.reason = event.reason
        request.end_step = run.steps[-1].index if run.steps else None
        if event.step is not None:
            request.end_step = event.step


def _note_reset(event: ev.EngineReset, run: RunSummary) -> None:
    for seq_id in event.seq_ids:
        request = run.requests[seq_id]
        request.reason = "aborted"
        request.end_step = event.step or (run.steps[-1].index if run.steps else None)


def _summarize_step(step: Step, run: RunSummary) -> StepSummary:
    arrived = _note_between_steps(step.before, run)
    for seq_id in arrived:
        run.requests[seq_id].arrival_step = step.index
    events = step.events
    admitted = []
    for event in events:
        if isinstance(event, ev.StateTransition):
            _note_end(event, run)
            if event.reason == "admitted":
                admitted.append(event.seq_id)
        elif isinstance(event, ev.Preempt):
            run.requests[event.seq_id].num_preemptions += 1
        elif isinstance(event, ev.SampleTokens):
            _note_tokens(event, run)
        elif isinstance(event, ev.EngineReset):
            _note_reset(event, run)
    shares = _shares(step, frozenset(admitted))
    for share in shares:
        run.requests[share.seq_id].num_cached_tokens += share.num_cached
    schedule, end = step.schedule, step.end
    return StepSummary(
        index=step.index,
        phase=None if schedule is None else _phase(schedule),
        reason=None if schedule is None else schedule.reason,
        shares=shares,
        num_batched_tokens=sum(share.num_tokens for share in shares),
        waiting_len=schedule.waiting_len if schedule else len(step.state.waiting),
        running_len=schedule.running_len if schedule else len(step.state.running),
        free_blocks=schedule.free_blocks if schedule else len(step.state.free_blocks),
        waiting=tuple(step.state.waiting),
        running=tuple(step.state.running),
        arrived=arrived,
        admitted=tuple(admitted),
        preempted=tuple(event for event in events if isinstance(event, ev.Preempt)),
        finished=tuple(
            (event.seq_id, event.reason)
            for event in events
            if isinstance(event, ev.StateTransition) and event.status == "FINISHED"
        ),
        stop=next((event for event in events if isinstance(event, ev.AdmissionStop)), None),
        error=next((event for event in events if isinstance(event, ev.EngineError)), None),
        pages=_page_counts(events),
        tags=frozenset(ev.tag_of(event) for event in (*step.before, *events)),
        start_ns=events[0].ts_ns,
        end_ns=events[-1].ts_ns,
        wall_ns=end.wall_ns if end else None,
    )


def _phase(schedule: ev.SchedulePrefill | ev.ScheduleDecode) -> Literal["prefill", "decode"]:
    return "prefill" if isinstance(schedule, ev.SchedulePrefill) else "decode"


def _note_tokens(event: ev.SampleTokens, run: RunSummary) -> None:
    for seq_id in event.seq_ids:
        request = run.requests[seq_id]
        request.num_completion_tokens += 1
        if request.first_token_step is None:
            request.first_token_step = event.step
            request.first_token_ns = event.ts_ns


def _shares(step: Step, admitted: frozenset[int]) -> tuple[Share, ...]:
    schedule = step.schedule
    if isinstance(schedule, ev.ScheduleDecode):
        return tuple(Share(seq_id, 0, 1, 1, 1) for seq_id in schedule.seq_ids)
    if schedule is None:
        return ()
    return tuple(
        Share(
            seq_id,
            num_computed,
            num_tokens,
            step.state.sequences[seq_id].num_prefill_tokens,
            step.state.sequences[seq_id].prompt_len,
            num_cached if seq_id in admitted else 0,
        )
        for seq_id, num_computed, num_tokens, num_cached in zip(
            schedule.seq_ids,
            schedule.num_computed_tokens,
            schedule.num_scheduled_tokens,
            schedule.num_cached_tokens,
            strict=True,
        )
    )


def _page_counts(events: list[ev.Event]) -> PageCounts:
    taken = reused = published = evicted = freed = 0
    for event in events:
        match event:
            case ev.BlocksAllocate() | ev.BlocksAppend():
                taken += sum(map(len, event.block_ids))
            case ev.BlocksShare() | ev.BlocksRevive():
                reused += sum(map(len, event.block_ids))
            case ev.BlocksHash():
                published += sum(map(len, event.block_ids))
            case ev.BlocksEvict():
                evicted += len(event.block_ids)
            case ev.BlocksRelease():
                freed += sum(map(len, event.freed))
    return PageCounts(taken, reused, published, evicted, freed)
