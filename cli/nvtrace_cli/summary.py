"""A run in numbers: what a replay shows, as values.

Knows what is worth showing of a step, a request and a run. Does not know how it is worked out from
a trace (`summarize.py`), nor words, tables or terminals (`views/`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

Phase = Literal["prefill", "decode", "mixed"]

if TYPE_CHECKING:
    from nvtrace import events as ev
    from nvtrace.envelope import Footer, Header
    from nvtrace.replay import InconsistentTraceError


@dataclass(frozen=True, slots=True)
class PageCounts:
    """What a step did to the KV pages.

    Attributes:
        num_taken: empty pages given out.
        num_reused: pages found in the prefix cache.
        num_published: pages put into the prefix cache.
        num_evicted: pages that left the prefix cache to be used anew.
        num_freed: pages that nobody holds any more.
        num_revived: of the reused ones, those that nobody was using.
    """

    num_taken: int = 0
    num_reused: int = 0
    num_published: int = 0
    num_evicted: int = 0
    num_freed: int = 0
    num_revived: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """One sequence's part of a step.

    Attributes:
        num_computed_before: tokens already in its pages.
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

    Queues and free pages are those after the decision, as in the step's SCHEDULE_* event;
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
    pages: PageCounts
    tags: frozenset[str]
    start_ns: int
    end_ns: int
    wall_ns: int | None  # None: the step did not end
    num_blocks_held: tuple[int, ...] = ()  # of each of `preempted`, before it gave way
    is_led: bool = False  # what a rank computed that decides nothing: queues and pages are unknown
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
class PhaseSum:
    """All steps of one phase together."""

    num_steps: int = 0
    wall_ns: int = 0


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
    sums: dict[Phase | None, PhaseSum] = field(default_factory=dict)
    first_step: int | None = None
    last_step: int | None = None
    steps: list[StepSummary] = field(default_factory=list)
    broken: InconsistentTraceError | None = None

    @property
    def is_led(self) -> bool:
        """Does another rank decide for this one? Then little is told. torchrun's all decide."""
        return self.header.rank > 0 and self.ready is None
