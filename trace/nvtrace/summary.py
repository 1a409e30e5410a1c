"""A run in numbers: its steps, its requests, and steps that look alike as one row.

    summarize(read_trace("trace.jsonl"))   the whole trace; steps that look alike: `fold_alike`
    summarize_steps(records, run)          one step after the other

Knows which events tell what of a step, a request and a run, and when two steps look alike. Does not
know words, tables or terminals. It keeps no event longer than it must, and what many steps have in
common only once, so that a long trace is summarized in little memory.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Literal, TypeVar

from nvtrace import events as ev
from nvtrace.envelope import Footer, Header
from nvtrace.explain.origins import whole_need
from nvtrace.metrics import PhaseMetrics
from nvtrace.replay import InconsistentTraceError, ended_by, fold_steps, phase_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    from nvtrace.envelope import Record
    from nvtrace.replay import State, Step
    from nvtrace.steptime import Phase

RequestState = Literal["waiting", "idle", "decode", "ended", "prefill", "preempted"]
"""What a request does in a step; idle: it is running, but not in the step's batch."""

_Value = TypeVar("_Value", bound="Hashable")
_MOST_TEXT = 1000  # characters of an answer: more than any terminal is wide
_MOST_KEPT = 10_000  # values that steps may have in common


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """What a step did to the KV blocks.

    Attributes:
        num_taken: empty blocks given out.
        num_reused: blocks found in the prefix cache.
        num_hashed: blocks put into the prefix cache.
        num_evicted: blocks that left the prefix cache to be used anew.
        num_freed: blocks that nobody holds any more.
        num_revived: of the reused ones, those that nobody was using.
    """

    num_taken: int = 0
    num_reused: int = 0
    num_hashed: int = 0
    num_evicted: int = 0
    num_freed: int = 0
    num_revived: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """One sequence's part of a step.

    Attributes:
        num_computed_before: tokens already in its blocks.
        num_tokens: tokens computed now.
        num_total: tokens there are to compute (less than that so far: a chunk).
        num_prompt: how many of them are the prompt; the others were generated before a preemption.
        num_cached: tokens that came from the prefix cache, if it was admitted in this step.
        is_prefill: does it compute its prompt, or a chunk of it, and not one sampled token?
    """

    seq_id: int
    num_computed_before: int
    num_tokens: int
    num_total: int
    num_prompt: int
    num_cached: int = 0
    is_prefill: bool = True

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

    Queues and free blocks are those after the decision, as in the step's SCHEDULE_* event;
    `waiting` and `running` are the queues at the step's end. A rank that another one leads knows
    its part of the batch only: see `is_led`.
    """

    index: int
    phase: Phase | None  # None: the trace ends before the decision
    reason: str | None
    shares: tuple[Share, ...]
    num_batched_tokens: int
    waiting_len: int
    running_len: int
    free_blocks: int
    waiting: tuple[int, ...]
    running: tuple[int, ...]
    arrived: tuple[int, ...]  # since the step before
    aborted: tuple[int, ...]  # since the step before
    admitted: tuple[int, ...]
    preempted: tuple[ev.Preempt, ...]
    finished: tuple[tuple[int, str], ...]  # (seq_id, reason)
    stop: ev.AdmissionStop | None
    error: ev.EngineError | None
    blocks: BlockCounts
    tags: frozenset[str]
    start_ns: int
    end_ns: int
    wall_ns: int | None  # None: the step did not end
    num_blocks_held: tuple[int, ...] = ()  # of each of `preempted`, before it gave way
    is_led: bool = False  # what a rank computed that decides nothing: queues and blocks are unknown
    scheduled: int = 0  # sequences in the batch, as the schedule says
    stop_whole: int | None = None  # what `stop` would need if the prefix cache had nothing

    @property
    def prefills(self) -> tuple[Share, ...]:
        """The part of the batch that computes prompts."""
        return tuple(share for share in self.shares if share.is_prefill)

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """The batch."""
        return tuple(share.seq_id for share in self.shares)

    @property
    def concerned(self) -> set[int]:
        """The requests that something happened to: in the batch, come, gone or kept waiting."""
        ended = {seq_id for seq_id, _ in self.finished}
        victims = {
            seq_id for event in self.preempted for seq_id in (event.seq_id, event.for_seq_id)
        }
        stopped = set() if self.stop is None else {self.stop.seq_id}
        return {*self.seq_ids, *self.arrived, *self.aborted} | ended | victims | stopped

    @property
    def present(self) -> set[int]:
        """The requests that were there: concerned, or in one of the queues."""
        return self.concerned.union(self.waiting, self.running)

    def states(self) -> Iterator[tuple[int, tuple[RequestState, ...]]]:
        """(seq_id, what the request does in this step: one thing, or its end as well) of each."""
        ended = {seq_id for seq_id, _ in self.finished}
        victims = {event.seq_id for event in self.preempted}
        batch = set(self.seq_ids)
        for share in self.shares:
            if share.seq_id not in ended:
                yield share.seq_id, ("prefill" if share.is_prefill else "decode",)
            else:
                yield share.seq_id, ("prefill", "ended") if share.is_prefill else ("ended",)
        for seq_id in {*self.aborted, *(ended - batch)}:
            yield seq_id, ("ended",)
        for seq_id in self.running:
            if seq_id not in batch:
                yield seq_id, ("idle",)
        for seq_id in self.waiting:
            yield seq_id, ("preempted" if seq_id in victims else "waiting",)


@dataclass(slots=True)
class RequestSummary:
    """One request, from its arrival to its end."""

    seq_id: int
    prompt_len: int
    max_tokens: int
    enqueued_ns: int
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt
    num_preemptions: int = 0
    first_token_step: int | None = None
    first_token_ns: int | None = None
    end_step: int | None = None  # the last step before which or in which it was there
    reason: str | None = None  # None: it has not ended
    text: str | None = None  # its beginning: as much as a line may show


@dataclass(slots=True)
class RunSummary:
    """A whole trace.

    Attributes:
        sums: of each phase, over all steps; None stands for steps that decided nothing.
        first_step, last_step: of all that the trace has; None if it has none.
        steps: those that were asked for.
        broken: what contradicts the events before it; None if nothing does. All before it is here.
    """

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
    sums: dict[Phase | None, PhaseMetrics] = field(default_factory=dict)
    first_step: int | None = None
    last_step: int | None = None
    steps: list[StepSummary] = field(default_factory=list)
    broken: InconsistentTraceError | None = None

    @property
    def is_led(self) -> bool:
        """Does another rank decide for this one? Then little is told. torchrun's all decide."""
        return self.header.rank > 0 and self.ready is None


# -- from events -----------------------------------------------------------------------------------


def summarize(
    records: Iterable[Record], *, is_wanted: Callable[[int], bool] | None = None
) -> RunSummary:
    """Fold a trace into its summary, up to an event that cannot follow from those before it.

    Args:
        records: what `nvtrace.reader.read_trace` yields, the header first.
        is_wanted: which steps to keep, by their number; all if None.
    """
    iterator = iter(records)
    header = next(iterator)
    if not isinstance(header, Header):
        raise TypeError("the first record of a trace is its header")
    run = RunSummary(header)
    try:
        for step in summarize_steps(iterator, run):
            if is_wanted is None or is_wanted(step.index):
                run.steps.append(step)
    except InconsistentTraceError as error:
        run.broken = error
    return run


def summarize_steps(
    records: Iterable[Record], run: RunSummary, state: State | None = None
) -> Iterator[StepSummary]:
    """Fold records into the summaries of their steps, one at a time.

    Args:
        records: of a trace, without its header; or its rest after a step.
        run: knows the requests that have not ended, and is kept up to date; its `steps` are not.
        state: what the records begin with; a new one if None.

    Raises:
        InconsistentTraceError: an event cannot follow from those before it.
    """
    common = _Common()
    for step in fold_steps(_watch(records, run), state, forgets_ended=True):
        with _understood(run):
            if step.index:
                summary = _summarize_step(step, run, common)
                _count(summary, run)
            else:  # what came after the last step
                note_requests(step.before, run.requests, run.last_step)
        if step.index:
            yield summary


@contextmanager
def _understood(run: RunSummary) -> Iterator[None]:
    """What cannot be made sense of is the trace's fault."""
    where = f"event {run.num_events} or one shortly before it"
    try:
        yield
    except KeyError as error:
        raise InconsistentTraceError(
            f"{where} is about request {error}, which never arrived"
        ) from error
    except (ValueError, ArithmeticError) as error:
        raise InconsistentTraceError(f"{where} contradicts itself: {error}") from error


class _Common:
    """What many steps have in common, so that it is kept once."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Hashable] = {}

    def __call__(self, value: _Value) -> _Value:
        """The same value, as it is kept already if it was there before."""
        if len(self._values) >= _MOST_KEPT:
            self._values.clear()
        return self._values.setdefault(value, value)  # type: ignore[return-value]  # they are equal


def _count(step: StepSummary, run: RunSummary) -> None:
    before = run.sums.get(step.phase, PhaseMetrics())
    wall_ns = before.wall_ns + (step.wall_ns or 0)
    run.sums[step.phase] = PhaseMetrics(before.num_steps + 1, wall_ns=wall_ns)
    run.first_step = step.index if run.first_step is None else run.first_step
    run.last_step = step.index


def _watch(records: Iterable[Record], run: RunSummary) -> Iterator[Record]:
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


def note_requests(
    events: Iterable[ev.Event], requests: dict[int, RequestSummary], last_step: int | None
) -> None:
    """Keep the requests up to date.

    Args:
        events: what happens next.
        requests: by their numbers.
        last_step: the last step before `events`; None before the first.

    Raises:
        KeyError: an event is about a request that never arrived.
    """
    for event in events:
        match event:
            case ev.RequestEnqueue():
                requests[event.seq_id] = RequestSummary(
                    event.seq_id, event.prompt_len, event.max_tokens, event.ts_ns
                )
            case ev.SampleTokens():
                for seq_id in event.seq_ids:
                    request = requests[seq_id]
                    request.num_completion_tokens += 1
                    if request.first_token_ns is None:
                        request.first_token_step = event.step
                        request.first_token_ns = event.ts_ns
            case ev.Preempt():
                requests[event.seq_id].num_preemptions += 1
            case ev.StateTransition() | ev.EngineReset():
                for seq_id, reason in ended_by(event):
                    requests[seq_id].reason = reason
                    requests[seq_id].end_step = last_step if event.step is None else event.step
            case ev.RequestOutput():
                requests[event.seq_id].text = event.text[:_MOST_TEXT]


def _summarize_step(step: Step, run: RunSummary, common: _Common) -> StepSummary:
    note_requests((*step.before, *step.events), run.requests, run.last_step)
    transitions = [event for event in step.events if isinstance(event, ev.StateTransition)]
    admitted = tuple(event.seq_id for event in transitions if event.status == "RUNNING")
    shares = common(_shares(step, frozenset(admitted), common))
    for share in shares:
        if share.seq_id in admitted and not share.is_recompute:
            run.requests[share.seq_id].num_cached_tokens = share.num_cached
    schedule, end, state = step.schedule, step.end, step.state
    stop = next((event for event in step.events if isinstance(event, ev.AdmissionStop)), None)
    is_led = schedule is None and run.header.rank > 0
    phase, num_seqs, num_tokens = _computed(step.events) if is_led else (None, 0, 0)
    return StepSummary(
        index=step.index,
        phase=phase if schedule is None else phase_of(schedule),
        reason=None if schedule is None else schedule.reason,
        shares=shares,
        num_batched_tokens=getattr(
            schedule, "num_batched_tokens", sum(share.num_tokens for share in shares) or num_tokens
        ),
        waiting_len=len(state.waiting) if schedule is None else schedule.waiting_len,
        running_len=len(state.running) if schedule is None else schedule.running_len,
        free_blocks=len(state.free_blocks) if schedule is None else schedule.free_blocks,
        waiting=common(tuple(state.waiting)),
        running=common(tuple(state.running)),
        arrived=tuple(
            event.seq_id for event in step.before if isinstance(event, ev.RequestEnqueue)
        ),
        aborted=tuple(event.seq_id for event in step.before if isinstance(event, ev.RequestAbort)),
        admitted=admitted,
        preempted=tuple(event for event in step.events if isinstance(event, ev.Preempt)),
        finished=tuple(end for event in step.events for end in ended_by(event)),
        stop=stop,
        error=next((event for event in step.events if isinstance(event, ev.EngineError)), None),
        blocks=common(_block_counts(step.events)),
        tags=common(frozenset(ev.tag_of(event) for event in (*step.before, *step.events))),
        start_ns=step.events[0].ts_ns,
        end_ns=step.events[-1].ts_ns,
        wall_ns=None if end is None else end.wall_ns,
        is_led=is_led,
        scheduled=num_seqs if schedule is None else schedule.scheduled,
        num_blocks_held=_held_by_preempted(step.events),
        stop_whole=None if stop is None else whole_need(stop, state),
    )


def _computed(events: list[ev.Event]) -> tuple[Phase | None, int, int]:
    """What a rank says that is told what to compute: the phase, the sequences, the tokens."""
    phase: Phase | None = None
    num_seqs = num_tokens = 0
    for event in events:
        match event:
            case ev.PreparePrefillTensors():
                phase, num_seqs, num_tokens = "prefill", event.n_seqs, event.flat_tokens
            case ev.PrepareDecodeTensors():
                phase, num_seqs, num_tokens = "decode", event.batch_size, event.batch_size
            case ev.RunEager(reason="mixed"):
                phase = "mixed"
    return phase, num_seqs, num_tokens


def _held_by_preempted(events: list[ev.Event]) -> tuple[int, ...]:
    held: dict[int, int] = {}
    found = []
    for event in events:
        if isinstance(event, ev.BlocksRelease):
            held |= dict(zip(event.seq_ids, map(len, event.block_ids), strict=True))
        elif isinstance(event, ev.Preempt):
            found.append(held.get(event.seq_id, event.num_blocks_freed))
    return tuple(found)


def _shares(step: Step, admitted: frozenset[int], common: _Common) -> tuple[Share, ...]:
    schedule = step.schedule
    if isinstance(schedule, ev.ScheduleDecode):
        return tuple(common(_decode_share(seq_id)) for seq_id in schedule.seq_ids)
    if schedule is None:
        return ()
    sequences = step.state.sequences
    return tuple(
        Share(
            seq_id,
            num_computed,
            num_tokens,
            sequences[seq_id].num_prefill_tokens,
            sequences[seq_id].prompt_len,
            num_cached if seq_id in admitted else 0,
        )
        if num_computed < sequences[seq_id].num_prefill_tokens
        else common(_decode_share(seq_id))
        for seq_id, num_computed, num_tokens, num_cached in zip(
            schedule.seq_ids,
            schedule.num_computed_tokens,
            schedule.num_scheduled_tokens,
            schedule.num_cached_tokens,
            strict=True,
        )
    )


def _decode_share(seq_id: int) -> Share:
    return Share(seq_id, 0, 1, 1, 1, is_prefill=False)


def _block_counts(events: list[ev.Event]) -> BlockCounts:
    taken = reused = hashed = evicted = freed = revived = 0
    for event in events:
        match event:
            case ev.BlocksAllocate() | ev.BlocksAppend():
                taken += sum(map(len, event.block_ids))
            case ev.BlocksShare():
                reused += sum(map(len, event.block_ids))
            case ev.BlocksRevive():
                revived += sum(map(len, event.block_ids))
            case ev.BlocksHash():
                hashed += sum(map(len, event.block_ids))
            case ev.BlocksEvict():
                evicted += len(event.block_ids)
            case ev.BlocksRelease():
                freed += sum(map(len, event.freed))
    return BlockCounts(taken, reused + revived, hashed, evicted, freed, revived)


# -- steps that look alike -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AlikeSteps:
    """Steps that follow one another and look alike: one row of the step table.

    Attributes:
        steps: in their order, at least one.
        batch_before: the batch size of the decode step before, if it was another one and nothing
            else in this row says why.
    """

    steps: tuple[StepSummary, ...]
    batch_before: int | None = None

    @property
    def first(self) -> StepSummary:
        """The first of the steps."""
        return self.steps[0]

    @property
    def last(self) -> StepSummary:
        """The last of the steps."""
        return self.steps[-1]

    @property
    def is_folded(self) -> bool:
        """Does the row stand for more than one step?"""
        return len(self.steps) > 1

    @property
    def wall_ns(self) -> float | None:
        """The step's time, or the median of several; None if no step ended."""
        times = [step.wall_ns for step in self.steps if step.wall_ns is not None]
        return median(times) if times else None


def fold_alike(steps: Iterable[StepSummary], *, is_unfolded: bool = False) -> list[AlikeSteps]:
    """Group steps into rows.

    Args:
        steps: in their order; gaps are allowed and never folded over.
        is_unfolded: give every step a row of its own.
    """
    rows: list[AlikeSteps] = []
    group: list[StepSummary] = []
    group_batch_before: int | None = None
    for step, batch_before in _with_batch_before(steps):
        stands_alone = is_unfolded or batch_before is not None or group_batch_before is not None
        if group and (stands_alone or not _looks_alike(group[-1], step)):
            rows.append(AlikeSteps(tuple(group), group_batch_before))
            group = []
        if not group:
            group_batch_before = batch_before
        group.append(step)
    if group:
        rows.append(AlikeSteps(tuple(group), group_batch_before))
    return rows


def _with_batch_before(steps: Iterable[StepSummary]) -> Iterator[tuple[StepSummary, int | None]]:
    before: StepSummary | None = None
    for step in steps:
        batch_before = None
        if before and before.phase == step.phase == "decode" and not step.preempted:
            batch_before = before.scheduled if before.scheduled != step.scheduled else None
        yield step, batch_before
        before = step


def _is_notable(step: StepSummary) -> bool:
    """Must the step be seen on its own?"""
    events = (step.arrived, step.aborted, step.admitted, step.preempted, step.finished)
    completes_prompt = any(share.is_complete for share in step.prefills)
    return (
        any(events)
        or completes_prompt
        or step.phase is None
        or step.error is not None
        or (step.wall_ns is None and not step.is_led)
    )


def _looks_alike(before: StepSummary, step: StepSummary) -> bool:
    """May `step` join the row that ends with `before`?"""
    return (
        step.index == before.index + 1
        and not _is_notable(before)
        and not _is_notable(step)
        and step.phase == before.phase
        and step.seq_ids == before.seq_ids
        and step.scheduled == before.scheduled
        and step.waiting == before.waiting
        and step.running == before.running
        and _stop_key(step) == _stop_key(before)
    )


def _stop_key(step: StepSummary) -> tuple[int, str] | None:
    return None if step.stop is None else (step.stop.seq_id, step.stop.reason)
