"""The summary of a run: its steps, its requests, and similar steps as one row.

    summary = summarize(read_trace("trace.jsonl"))    (`summarize.py`)
    rows = fold_alike(summary.steps)                  similar steps in succession are one row

These are facts; the words for them are in the catalogs, and the tables in the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nvtrace import events as ev
    from nvtrace.envelope import Footer, Header
    from nvtrace.metrics import PhaseMetrics
    from nvtrace.replay import InconsistentTraceError
    from nvtrace.steptime import Phase

RequestState = Literal["waiting", "idle", "decode", "ended", "prefill", "preempted"]
"""What a request does in a step; idle: it is running, but not in the step's batch."""


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
