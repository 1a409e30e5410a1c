"""Metrics: the definitions of all metrics, of a request and of a run.

Names and formulas are vLLM's (`vllm:...`) and OpenTelemetry's (`gen_ai.server...`) where these have
one. docs/en/metrics.md explains them. `measure.py` collects them from events.

    arrival    scheduled          first token                       last token = finished
       |  queue    |      prefill      |             decode             |
       |-----------|-------------------|---------|...........|----------|
       |       time to first token     |           preempted            |
       |                     end to end latency                         |

A token counts when its step ends, since it cannot be seen outside before. All times are in
nanoseconds of the trace's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nvtrace import events as ev
    from nvtrace.distribution import Percentiles

_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """One request that has ended. A time of something that did not happen is None, not 0.

    Attributes:
        seq_id: the request's number.
        finish_reason: the code of its end; "aborted" if it was aborted or lost to an error.
        num_prompt_tokens: vllm:request_prompt_tokens.
        num_generation_tokens: vllm:request_generation_tokens; those of steps that ended.
        num_cached_tokens: prompt tokens that the prefix cache had at its first admission.
        num_preemptions: how often it was preempted.
        num_recomputed_tokens: tokens whose K and V a preemption gave up and the prefix cache did
            have at the re-admission.
        arrival_ns: when it was enqueued.
        scheduled_ns: when it was first admitted.
        token_ns: when the step of each generated token ended.
        finished_ns: when its last step ended, or when it was aborted.
        preempted_in_prefill_ns, preempted_in_decode_ns: time back in the waiting queue, before and
            after its first token.
    """

    seq_id: int
    finish_reason: str
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    arrival_ns: int
    scheduled_ns: int | None
    token_ns: tuple[int, ...]
    finished_ns: int
    preempted_in_prefill_ns: int
    preempted_in_decode_ns: int

    @property
    def first_token_ns(self) -> int | None:
        """When the step of its first token ended."""
        return self.token_ns[0] if self.token_ns else None

    @property
    def time_to_first_token_ns(self) -> int | None:
        """TTFT = first token - arrival.

        vllm:time_to_first_token_seconds, gen_ai.server.time_to_first_token.
        """
        return None if self.first_token_ns is None else self.first_token_ns - self.arrival_ns

    @property
    def inter_token_latencies_ns(self) -> tuple[int, ...]:
        """ITL = token i - token (i - 1), one for each token after the first.

        vllm:inter_token_latency_seconds. A preemption shows as one long gap.
        """
        return tuple(after - before for before, after in pairwise(self.token_ns))

    @property
    def time_per_output_token_ns(self) -> float | None:
        """TPOT = (last token - first token) / (tokens - 1): the mean of the request's ITLs.

        vllm:request_time_per_output_token_seconds, gen_ai.server.time_per_output_token. None
        if it has only one token.
        """
        if len(self.token_ns) < 2:  # noqa: PLR2004 - a gap has two ends
            return None
        return (self.token_ns[-1] - self.token_ns[0]) / (len(self.token_ns) - 1)

    @property
    def request_queue_time_ns(self) -> int:
        """Queue = scheduled - arrival: in the waiting queue for the first time.

        vllm:request_queue_time_seconds. For one that was never admitted: until its end.
        """
        end = self.finished_ns if self.scheduled_ns is None else self.scheduled_ns
        return end - self.arrival_ns

    @property
    def request_prefill_time_ns(self) -> int | None:
        """Prefill = first token - scheduled, a preemption in between included.

        vllm:request_prefill_time_seconds. For one that got no token: until its end.
        """
        if self.scheduled_ns is None:
            return None
        end = self.finished_ns if self.first_token_ns is None else self.first_token_ns
        return end - self.scheduled_ns

    @property
    def request_decode_time_ns(self) -> int | None:
        """Decode = finished - first token, a preemption in between included.

        vllm:request_decode_time_seconds. Its last token is its end, unless it was aborted.
        """
        return None if self.first_token_ns is None else self.finished_ns - self.first_token_ns

    @property
    def request_inference_time_ns(self) -> int | None:
        """Inference = prefill + decode = finished - scheduled.

        vllm:request_inference_time_seconds.
        """
        return None if self.scheduled_ns is None else self.finished_ns - self.scheduled_ns

    @property
    def request_preempted_time_ns(self) -> int:
        """Preempted = time back in the waiting queue, a part of prefill or decode. Ours."""
        return self.preempted_in_prefill_ns + self.preempted_in_decode_ns

    @property
    def e2e_request_latency_ns(self) -> int:
        """End to end = finished - arrival = queue + prefill + decode.

        vllm:e2e_request_latency_seconds, gen_ai.server.request.duration.
        """
        return self.finished_ns - self.arrival_ns


@dataclass(frozen=True, slots=True)
class PhaseMetrics:
    """The steps of one kind (prefill, decode, mixed), those that ended.

    Attributes:
        num_steps: how many.
        num_seqs: sequences in them, each step's added up.
        num_tokens: tokens computed, each step's added up (vllm:iteration_tokens_total).
        wall_ns: the host's time.
        gpu_ns: the device's own time; None where no step has one.
    """

    num_steps: int = 0
    num_seqs: int = 0
    num_tokens: int = 0
    wall_ns: int = 0
    gpu_ns: int | None = None


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """A whole trace. What cannot be measured is None, not 0.

    Latencies of requests are over those that finished; TTFT and ITL over every token, as vLLM
    observes them when they happen.

    Attributes:
        num_requests: requests that were enqueued.
        num_finished: of them, those that finished (vllm:request_success).
        num_aborted: of them, those that were aborted or lost to an error.
        num_unfinished: of them, those still in a queue at the trace's end.
        num_refused: requests that were refused; not among num_requests.
        num_prompt_tokens: of the requests that got a first token (vllm:prompt_tokens).
        num_generation_tokens: tokens generated (vllm:generation_tokens).
        prefix_cache_queries: prompt tokens looked up at first admissions; 0 if the cache is off.
        prefix_cache_hits: of them, those that the cache had.
        num_preemptions: vllm:num_preemptions.
        num_recomputed_tokens: see RequestMetrics.
        duration_ns: from the first arrival to the end of the last step.
        phases: the steps, by phase; a phase without steps is left out.
        largest_batch: the most sequences in a decode or mixed step.
        token_budget: tokens a step may compute (max_num_batched_tokens).
        num_blocks: KV blocks in the pool.
        mean_blocks_used, max_blocks_used: blocks held while a step computes, over all steps.
        num_graph_rows: rows of all CUDA graph replays.
        num_graph_padding: of them, those that no sequence fills.
        time_to_first_token_ns, inter_token_latency_ns, time_per_output_token_ns,
        request_queue_time_ns, request_prefill_time_ns, request_decode_time_ns,
        request_inference_time_ns, request_preempted_time_ns, e2e_request_latency_ns: each
            request's, as distributions.
    """

    num_requests: int
    num_finished: int
    num_aborted: int
    num_unfinished: int
    num_refused: int
    num_prompt_tokens: int
    num_generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    num_recomputed_tokens: int
    duration_ns: int
    phases: dict[str, PhaseMetrics]
    largest_batch: int
    token_budget: int | None
    num_blocks: int
    mean_blocks_used: float | None
    max_blocks_used: int | None
    num_graph_rows: int
    num_graph_padding: int
    time_to_first_token_ns: Percentiles | None
    inter_token_latency_ns: Percentiles | None
    time_per_output_token_ns: Percentiles | None
    request_queue_time_ns: Percentiles | None
    request_prefill_time_ns: Percentiles | None
    request_decode_time_ns: Percentiles | None
    request_inference_time_ns: Percentiles | None
    request_preempted_time_ns: Percentiles | None
    e2e_request_latency_ns: Percentiles | None

    @property
    def step_time_ns(self) -> int:
        """Host time in all steps; the rest of the duration is between steps."""
        return sum(phase.wall_ns for phase in self.phases.values())

    @property
    def request_throughput(self) -> float | None:
        """Requests per second = num_finished / duration. `vllm bench serve` has the name."""
        return self._per_second(self.num_finished)

    @property
    def output_throughput(self) -> float | None:
        """Generated tokens per second = num_generation_tokens / duration. As vllm bench's."""
        return self._per_second(self.num_generation_tokens)

    @property
    def total_token_throughput(self) -> float | None:
        """Tokens per second = (prompt + generated tokens) / duration. As vllm bench's."""
        return self._per_second(self.num_prompt_tokens + self.num_generation_tokens)

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """Hits / queries, in tokens (vllm:prefix_cache_hits / vllm:prefix_cache_queries)."""
        return _share(self.prefix_cache_hits, self.prefix_cache_queries)

    @property
    def batch_efficiency(self) -> float | None:
        """Mean batch / largest batch, over decode and mixed steps. Ours.

        1 if no place in the batch stays empty until the longest request has ended.
        """
        steps = [self.phases[kind] for kind in ("decode", "mixed") if kind in self.phases]
        num_seats = self.largest_batch * sum(phase.num_steps for phase in steps)
        return _share(sum(phase.num_seqs for phase in steps), num_seats)

    @property
    def token_budget_use(self) -> float | None:
        """Tokens computed / token budget, over prefill and mixed steps. Ours."""
        steps = [self.phases[kind] for kind in ("prefill", "mixed") if kind in self.phases]
        num_offered = (self.token_budget or 0) * sum(phase.num_steps for phase in steps)
        return _share(sum(phase.num_tokens for phase in steps), num_offered)

    @property
    def graph_padding(self) -> float | None:
        """Padding rows / rows of all CUDA graph replays. Ours."""
        return _share(self.num_graph_padding, self.num_graph_rows)

    @property
    def kv_cache_usage(self) -> float | None:
        """Mean blocks held / blocks in the pool, from 0 to 1 (vllm:kv_cache_usage_perc).

        Free blocks that are still hashed count as free.
        """
        return _share(self.mean_blocks_used, self.num_blocks)

    @property
    def max_kv_cache_usage(self) -> float | None:
        """The largest KV cache usage of a step."""
        return _share(self.max_blocks_used, self.num_blocks)

    def _per_second(self, number: int) -> float | None:
        return number * _NS_PER_S / self.duration_ns if self.duration_ns else None


def _share(part: float | None, whole: float) -> float | None:
    return None if part is None or not whole else part / whole


def metric_names(cls: type[RequestMetrics | RunMetrics]) -> list[str]:
    """The names of all metrics of a record: its fields, then its properties."""
    derived = [name for name, value in vars(cls).items() if isinstance(value, property)]
    given = [field.name for field in fields(cls)]
    return [*(name for name in given if name != "token_ns"), *derived]


def facts(metrics: RequestMetrics | RunMetrics) -> dict[str, object]:
    """All metrics of a record by their names."""
    return {name: getattr(metrics, name) for name in metric_names(type(metrics))}


@dataclass(frozen=True, slots=True)
class Refusals:
    """Requests that were refused for one reason.

    Attributes:
        reason: REQUEST_REFUSED's.
        count: how many.
        least_need, most_need: the blocks they need, or tokens for "prompt_too_long".
        have: the blocks, or tokens, that there are.
    """

    reason: str
    count: int
    least_need: int
    most_need: int
    have: int


def refusals_of(events: Iterable[ev.RequestRefused]) -> Iterator[Refusals]:
    """Group refusals by their reason."""
    groups: dict[tuple[str, int], list[int]] = {}
    for event in events:
        groups.setdefault((event.reason, event.have), []).append(event.need)
    for (reason, have), needs in groups.items():
        yield Refusals(reason, len(needs), min(needs), max(needs), have)
