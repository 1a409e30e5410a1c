"""Links: the parts of an explanation. Each is one fact, its numbers, and the events that prove it.

    a request   Queued -> Waited ... -> Admitted -> Prefilled ... -> Decoded ... -> Ended
                              ^                                         |
                              +---------------- Preempted <-------------+
    a step      Came, Chosen, Computed, Left, Joined, Aside, Stopped, Ran, Paced, Finished ...

Facts and reason codes only, no prose. As JSON a link is an object whose "kind" is its class's name
in lower case. `request.py` and `step.py` build the chains.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from nvtrace.events import Phase, Status  # noqa: TC001 - msgspec reads the annotations

Span = tuple[int, int]
"""The smallest and the largest value of a number over a link's steps."""


class Link(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """The fields of all links.

    Attributes:
        first_step, last_step: the engine steps it is about; the step before (0 if there was none)
            for an event between two steps.
        num_steps: steps of the request that it accounts for; 0 for a single event.
        time_ns: time of the request that it accounts for.
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
    """It arrived and was added to the waiting queue."""

    prompt_len: int
    max_tokens: int
    num_ahead: int


class Waited(Link, frozen=True, kw_only=True):
    """It was in the waiting queue during these steps.

    Attributes:
        reason: why the queue's head was not admitted (ADMISSION_STOP's); None without that event.
        head_seq_id: the queue's head, which may be the request itself.
        need, have: the blocks or tokens that the head needs, and those that there are.
        whole: what it would need without the prefix cache; None if the cache has nothing of it, or
            if it needs neither blocks nor tokens.
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
    """It was moved to the running queue and got its blocks.

    Attributes:
        num_tokens: its tokens, to be computed unless the prefix cache has them.
        num_cached_tokens: of them, those that the prefix cache had.
        num_shared_blocks: cached blocks that other requests use as well: `shared_with`.
        num_revived_blocks: cached blocks that were free; `left_by`: requests that computed them.
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
        num_total: tokens to compute, those generated before a preemption included.
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
    """One token was sampled in each step. `batch`: sequences in a step, itself included."""

    batch: Span


class Idled(Link, frozen=True, kw_only=True):
    """It was running, but not in the batch.

    Attributes:
        reason: "prefills_first" (the step computed prompts only) or "token_budget" (others used up
            the budget); or the request's status, if that is unknown.
        batch: sequences in the step.
    """

    reason: str
    batch: Span


class Preempted(Link, frozen=True, kw_only=True):
    """It was preempted: its blocks were released for another request, or for itself if it was last.

    Attributes:
        num_blocks_held: its blocks before.
        kept_by: requests that use those of them that did not become free.
        is_prefilling: was it still computing its prompt?
    """

    seq_id: int
    for_seq_id: int
    num_blocks_held: int
    num_blocks_freed: int
    kept_by: tuple[int, ...]
    num_tokens_to_recompute: int
    is_prefilling: bool


class Broken(Link, frozen=True, kw_only=True):
    """An exception ended the step; `error` is its type, None if it was not recorded."""

    error: str | None


class Ended(Link, frozen=True, kw_only=True):
    """It left the engine.

    Attributes:
        reason: the code of its STATE_TRANSITION; "aborted" also after an error.
        token_id: its last token; None if it has none, or after an error.
        is_between: did it end between two steps?
    """

    reason: str
    num_completion_tokens: int
    max_tokens: int
    token_id: int | None
    is_between: bool


class Unended(Link, frozen=True, kw_only=True):
    """It had not ended when the trace ends."""

    status: Status
    num_completion_tokens: int
    max_tokens: int


AnyLife = (
    Queued | Waited | Admitted | Prefilled | Decoded | Idled | Preempted | Broken | Ended | Unended
)


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """A request's time in four parts.

    As `nvtrace.metrics` defines them, but prefill and decode without the time preempted.
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
    """A request explained. `times` is None if only one step was asked for."""

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
    """The phase of the step, and the policy's reason."""

    phase: Phase
    reason: str


class Computed(Link, frozen=True, kw_only=True):
    """The batch: its requests and tokens, and the budget.

    Attributes:
        decode_ids, prefill_ids: requests that decode, and those that compute (a chunk of) a prompt.
        num_tokens, token_budget: tokens computed, and the most allowed.
        num_cached_tokens: tokens of its prompts that were in the prefix cache.
        num_waiting, num_running: lengths of the queues after the schedule.
        before_step, before_batch: the last step that decoded, and how many requests it decoded;
            None if there was none, or if this step decodes none.
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
    """These were decoded in the last step that decoded, and are not now.

    Attributes:
        reason: the code of their end, "preempted", or "token_budget".
    """

    seq_ids: tuple[int, ...]
    reason: str


class Joined(Link, frozen=True, kw_only=True):
    """These are decoded now, and were not in the last step that decoded.

    Attributes:
        reason: "prefilled", "recomputed" (after a preemption), or "token_budget" (there was none
            left for them before).
    """

    seq_ids: tuple[int, ...]
    reason: str


class Aside(Link, frozen=True, kw_only=True):
    """These are running, but not in the batch. `reason`: see Idled."""

    seq_ids: tuple[int, ...]
    reason: str


class Stopped(Link, frozen=True, kw_only=True):
    """No other request was admitted: what the waiting queue's head needs, and what there was.

    Attributes:
        whole: see Waited.
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
        late_reason: why it was not run ahead; None if it was.
    """

    batch_size: int
    graph_batch_size: int
    padding: int
    is_ahead: bool
    late_reason: LateReason | None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a step: its time, and the median of that part over the other steps of its group."""

    time_ns: int
    median_ns: float | None


class Paced(Link, frozen=True, kw_only=True):
    """How long the step took, beside the others of its group.

    Attributes:
        phase, graph_batch_size, bucket: the group. Steps of a phase that replay a graph of the
            same size; or else those that compute up to `bucket` tokens (a power of two).
        wall_ns: the host's time.
        median_ns: the median of the others; None if there are none.
        limit_ns: above this a step is slow (`Distribution.usual_limit`).
        num_others: number of other steps.
        is_first: is it the first of its group? The first replay of a graph, or the first call of a
            kernel, takes longer than the next.
        is_slow: did it take longer than `limit_ns`?
        grown: the part that made it slow: schedule, prepare, forward, sample, postprocess or gpu.
        parts: the time of each part, and its median.
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
    """These ended in the step."""

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
