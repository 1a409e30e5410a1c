"""Links: what an explanation is made of. Each is one fact with its numbers and its proof.

    a request   Queued -> Waited ... -> Admitted -> Prefilled ... -> Decoded ... -> Ended
                              ^                                         |
                              +---------------- Preempted <-------------+
    a step      Came, Chosen, Computed, Left, Joined, Aside, Stopped, Ran, Paced, Finished ...

Facts and reason codes only, no prose. As JSON a link is an object whose "kind" is its class's name
in small letters. Does not know how a chain is found (`request.py`, `step.py`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from nvtrace.events import Phase, Status  # noqa: TC001 - msgspec reads the annotations

Span = tuple[int, int]
"""The least and the most of a number over a link's steps."""


class Link(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """What all links share.

    Attributes:
        first_step, last_step: the engine steps it is about; of what happened between two steps,
            the one before (0 if there was none).
        num_steps: steps of the request's life that it accounts for. 0 for a moment.
        time_ns: the share of the request's life that it accounts for.
        event_ids: the events that prove it.
    """

    first_step: int
    last_step: int
    num_steps: int = 0
    time_ns: int = 0
    event_ids: tuple[int, ...] = ()


def kind_of(link: Link) -> str:
    """The link's name, as in JSON."""
    return str(link.__struct_config__.tag)


# -- a request's life ------------------------------------------------------------------------------


class Queued(Link, frozen=True, kw_only=True):
    """It arrived, and joined the waiting queue's tail."""

    prompt_len: int
    max_tokens: int
    num_ahead: int


class Waited(Link, frozen=True, kw_only=True):
    """It sat in the waiting queue while steps went by.

    Attributes:
        reason: why the queue's head was not admitted (ADMISSION_STOP); None if nobody said so.
        head_seq_id: the head that the reason is about: itself, or who it waits behind.
        need, have: what the head needs, and what there is of it.
        whole: what it would need if the prefix cache had nothing of it; None if the cache has
            nothing, or this is no matter of blocks or tokens.
        num_ahead: requests before it in the queue.
        is_preempted: has it been admitted before?
    """

    reason: str | None
    head_seq_id: int | None
    need: Span | None
    have: Span | None
    whole: Span | None = None
    num_ahead: Span
    is_preempted: bool


class Admitted(Link, frozen=True, kw_only=True):
    """It moved to the running queue, and got its blocks.

    Attributes:
        num_tokens: tokens it has, to be computed unless the prefix cache has them.
        num_cached_tokens: of them, those that the prefix cache had.
        num_shared_blocks: cached blocks that others hold as well; `shared_with`, by whom.
        num_revived_blocks: cached blocks that nobody held any more; `left_by`, who computed them.
        num_new_blocks: empty blocks.
        is_again: was it preempted before?
    """

    num_tokens: int
    num_cached_tokens: int
    num_shared_blocks: int
    shared_with: tuple[int, ...]
    num_revived_blocks: int
    left_by: tuple[int, ...]
    num_new_blocks: int
    is_again: bool


class Prefilled(Link, frozen=True, kw_only=True):
    """Its prompt was computed, or chunks of it.

    Attributes:
        first_token, last_token: positions computed now.
        num_total: tokens there are to compute; what it had generated before a preemption is among
            them.
        num_recomputed: of those computed now, tokens that had been computed before.
        batch: sequences in the step, itself included.
        is_complete: was everything computed by the end, so that a token was sampled?
    """

    first_token: int
    last_token: int
    num_total: int
    num_recomputed: int
    batch: Span
    is_complete: bool


class Decoded(Link, frozen=True, kw_only=True):
    """It got one token in each of the steps. `batch`: sequences in a step, itself included."""

    batch: Span


class Idled(Link, frozen=True, kw_only=True):
    """It was running, but not in the batch.

    Attributes:
        reason: "prefills_first" (the step computed prompts only) or "token_budget" (the budget was
            used up before its turn came); or the request's status, if it is not known here.
        batch: sequences in the step instead.
    """

    reason: str
    batch: Span


class Preempted(Link, frozen=True, kw_only=True):
    """It gave up its blocks, so that another (or, if nobody else was left, the rest) could go on.

    Attributes:
        num_blocks_held: its blocks.
        kept_by: who uses those of them that did not become free.
        is_prefilling: did it strike before all its tokens were computed?
    """

    seq_id: int
    for_seq_id: int
    num_blocks_held: int
    num_blocks_freed: int
    kept_by: tuple[int, ...]
    num_tokens_to_recompute: int
    is_prefilling: bool


class Broken(Link, frozen=True, kw_only=True):
    """The step was broken off by an exception; `error` is its type, None if nobody said so."""

    error: str | None


class Ended(Link, frozen=True, kw_only=True):
    """It left the engine.

    Attributes:
        reason: the code of its STATE_TRANSITION; "aborted" also after an error.
        token_id: its last token; None if it has none, or after an error.
        is_between: between two steps?
    """

    reason: str
    num_completion_tokens: int
    max_tokens: int
    token_id: int | None
    is_between: bool


class Unended(Link, frozen=True, kw_only=True):
    """The trace ends, and it has not."""

    status: Status
    num_completion_tokens: int
    max_tokens: int


AnyLife = (
    Queued | Waited | Admitted | Prefilled | Decoded | Idled | Preempted | Broken | Ended | Unended
)


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's time went: the four add up to the whole.

    As `nvtrace.metrics` defines them, but with the time back in the waiting queue taken out of
    prefill and decode.
    """

    queue_ns: int
    prefill_ns: int
    decode_ns: int
    preempted_ns: int

    @property
    def total_ns(self) -> int:
        """From its arrival to its end, or the trace's."""
        return self.queue_ns + self.prefill_ns + self.decode_ns + self.preempted_ns


class RequestStory(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="request"):
    """A request explained. `times` is None if only a part of its life was asked for."""

    seq_id: int
    prompt_len: int
    max_tokens: int
    chain: tuple[AnyLife, ...]
    times: Times | None


# -- a step ----------------------------------------------------------------------------------------


class Came(Link, frozen=True, kw_only=True):
    """These requests arrived since the step before."""

    seq_ids: tuple[int, ...]


class Chosen(Link, frozen=True, kw_only=True):
    """What the step was to compute, and the policy's reason."""

    phase: Phase
    reason: str


class Computed(Link, frozen=True, kw_only=True):
    """The batch: who, how much, of how much.

    Attributes:
        decode_ids, prefill_ids: who got one token, and who computed (a chunk of) a prompt.
        num_tokens, token_budget: tokens computed, and how many it might have been.
        num_cached_tokens: tokens of its prompts that were in the prefix cache.
        num_waiting, num_running: the queues after the decision.
        before_step, before_batch: the step that decoded last, and the sequences it decoded. None
            if there was none, or if this step decodes nobody.
    """

    decode_ids: tuple[int, ...]
    prefill_ids: tuple[int, ...]
    num_tokens: int
    token_budget: int
    num_cached_tokens: int
    num_waiting: int
    num_running: int
    before_step: int | None
    before_batch: int | None


class Left(Link, frozen=True, kw_only=True):
    """These were decoded the last time, and are not now.

    Attributes:
        reason: the code of their end, "preempted", or "token_budget".
    """

    seq_ids: tuple[int, ...]
    reason: str


class Joined(Link, frozen=True, kw_only=True):
    """These are decoded now, and were not the last time.

    Attributes:
        reason: "prefilled", "recomputed" (after a preemption), or "token_budget" (it had left no
            room for them).
    """

    seq_ids: tuple[int, ...]
    reason: str


class Aside(Link, frozen=True, kw_only=True):
    """These are running, and not in the batch. `reason`: as Idled has it."""

    seq_ids: tuple[int, ...]
    reason: str


class Stopped(Link, frozen=True, kw_only=True):
    """Nobody else was admitted: what the waiting queue's head needs, and what there was of it.

    Attributes:
        whole: as Waited has it.
    """

    head_seq_id: int
    reason: str
    need: int
    have: int
    whole: int | None = None
    num_waiting: int


class Eager(Link, frozen=True, kw_only=True):
    """The model ran kernel by kernel. `reason`: RUN_EAGER's."""

    reason: str
    num_tokens: int


LateReason = Literal["first", "other_graph", "ranks", "waiting", "unforeseen"]


class Replayed(Link, frozen=True, kw_only=True):
    """The decode was launched as one CUDA graph; rows beyond the batch are padding.

    Attributes:
        late_reason: why it was not launched ahead; None if it was.
    """

    batch_size: int
    graph_batch_size: int
    padding: int
    is_ahead: bool
    late_reason: LateReason | None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a step: its time, and the median of that part over the other steps of its class."""

    time_ns: int
    median_ns: float | None


class Paced(Link, frozen=True, kw_only=True):
    """How long the step took, beside the others of its class.

    Attributes:
        phase, graph_batch_size, bucket: the class. Steps of a phase that replay a graph of the
            same size; or else those that compute up to `bucket` tokens (a power of two).
        wall_ns: the host's time.
        median_ns: the median of the others; None if there are none.
        limit_ns: the most that is usual among them (`Distribution.usual_limit`).
        num_others: how many there are.
        is_first: is it the first of them all? The first replay of a graph, or the first call of a
            kernel, costs more than the next.
        is_slow: more than that.
        grown: the part that made it slow: schedule, prepare, forward, sample, postprocess or gpu.
        parts: each part's time, and its median.
    """

    phase: Phase
    graph_batch_size: int | None
    bucket: int | None
    wall_ns: int
    median_ns: float | None
    limit_ns: float | None
    num_others: int
    is_first: bool
    is_slow: bool
    grown: str | None
    parts: dict[str, Part]


class Finished(Link, frozen=True, kw_only=True):
    """These ended with it."""

    seq_ids: tuple[int, ...]
    reason: str


AnyStep = (
    Came
    | Chosen
    | Computed
    | Left
    | Joined
    | Aside
    | Preempted
    | Stopped
    | Eager
    | Replayed
    | Paced
    | Finished
    | Broken
)


class StepStory(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """A step explained."""

    step: int
    chain: tuple[AnyStep, ...]
