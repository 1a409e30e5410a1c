"""Measure: computes a trace's metrics from its events, in one pass and bounded memory.

    measure = Measure()
    for record in read_trace("trace.jsonl"):
        for request in measure.apply(record):     # those that ended with this record
            ...
    run = measure.run()

`metrics.py` defines the metrics. Only requests that have not ended are kept; of the others, counts.
A step's tokens and ends count at its STEP_END, so no grouping into steps is needed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from nvtrace import events as ev
from nvtrace.distribution import Distribution
from nvtrace.envelope import Header
from nvtrace.metrics import PhaseMetrics, RequestMetrics, RunMetrics
from nvtrace.replay import InconsistentTraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nvtrace.envelope import Record

# The metrics of an ended request that go into a distribution.
_LIFE_METRICS = (
    "time_per_output_token_ns",
    "request_queue_time_ns",
    "request_prefill_time_ns",
    "request_decode_time_ns",
    "request_inference_time_ns",
    "request_preempted_time_ns",
    "e2e_request_latency_ns",
)
_TOKEN_METRICS = ("time_to_first_token_ns", "inter_token_latency_ns")


@dataclass(slots=True)
class _Life:
    """A request that has not ended."""

    seq_id: int
    num_prompt_tokens: int
    arrival_ns: int
    scheduled_ns: int | None = None
    token_ns: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_given_up: int = 0  # tokens, by its last preemption
    preempted_at_ns: int | None = None  # None: it is not preempted now
    preempted_in_prefill_ns: int = 0
    preempted_in_decode_ns: int = 0

    def resume(self, now: int) -> None:
        """It is admitted again, or ended."""
        if self.preempted_at_ns is None:
            return
        if self.token_ns:
            self.preempted_in_decode_ns += now - self.preempted_at_ns
        else:
            self.preempted_in_prefill_ns += now - self.preempted_at_ns
        self.preempted_at_ns = None

    def end(self, now: int, reason: str) -> RequestMetrics:
        """Its metrics, now that it has ended."""
        self.resume(now)
        return RequestMetrics(
            seq_id=self.seq_id,
            finish_reason=reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generation_tokens=len(self.token_ns),
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            num_recomputed_tokens=self.num_recomputed_tokens,
            arrival_ns=self.arrival_ns,
            scheduled_ns=self.scheduled_ns,
            token_ns=tuple(self.token_ns),
            finished_ns=now,
            preempted_in_prefill_ns=self.preempted_in_prefill_ns,
            preempted_in_decode_ns=self.preempted_in_decode_ns,
        )


@dataclass(slots=True)
class _Sums:
    """What is counted over the whole run."""

    num_requests: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    largest_batch: int = 0
    num_blocks: int = 0
    max_blocks_used: int | None = None
    num_graph_rows: int = 0
    num_graph_padding: int = 0


class Measure:
    """Takes in a trace record by record."""

    def __init__(self) -> None:
        self._lives: dict[int, _Life] = {}
        self._sums = _Sums()
        self._phases: dict[str, PhaseMetrics] = {}
        names = (*_TOKEN_METRICS, *_LIFE_METRICS)
        self._distributions = {name: Distribution() for name in names}
        self._token_budget: int | None = None
        self._has_prefix_cache = False
        self._is_led = False  # does another rank schedule for this one?
        self._first_arrival_ns: int | None = None
        self._last_end_ns = 0
        self._num_schedules = self._sum_blocks_used = 0
        # Of the current step:
        self._admitted: dict[int, bool] = {}  # seq_id -> is it for the first time?
        self._drawn: list[int] = []
        self._ending: dict[int, str] = {}

    def apply(self, record: Record) -> list[RequestMetrics]:
        """Take in one record. Returns the requests that ended with it.

        Raises:
            InconsistentTraceError: it is about a request that never arrived, or its lists are not
                equally long.
        """
        handler = self._handlers.get(type(record))
        if handler is None:
            return []
        try:
            return handler(self, record) or []
        except KeyError as error:
            raise InconsistentTraceError(
                f"{_name(record)} is about request {error}, which never arrived or has ended before"
            ) from error
        except (ValueError, ArithmeticError) as error:
            raise InconsistentTraceError(f"{_name(record)} contradicts itself: {error}") from error

    def run(self) -> RunMetrics:
        """The metrics of all that was taken in so far."""
        spreads: dict[str, Any] = {name: d.spread() for name, d in self._distributions.items()}
        num_schedules, first = self._num_schedules, self._first_arrival_ns
        return RunMetrics(
            **asdict(self._sums),
            **spreads,
            num_unfinished=len(self._lives),
            duration_ns=0 if first is None else max(self._last_end_ns - first, 0),
            phases=dict(self._phases),
            token_budget=self._token_budget,
            mean_blocks_used=self._sum_blocks_used / num_schedules if num_schedules else None,
        )

    def _header(self, header: Header) -> None:
        self._is_led = header.rank > 0

    def _layout(self, event: ev.PreparePrefillTensors | ev.PrepareDecodeTensors) -> None:
        """Count a step of a rank that does not schedule: it records no STEP_END."""
        if not self._is_led:
            return
        if isinstance(event, ev.PrepareDecodeTensors):
            kind, num_seqs, num_tokens = "decode", event.batch_size, event.batch_size
            self._sums.largest_batch = max(self._sums.largest_batch, num_seqs)
        else:
            kind, num_seqs, num_tokens = "prefill", event.n_seqs, event.flat_tokens
        before = self._phases.get(kind, PhaseMetrics())
        self._phases[kind] = PhaseMetrics(
            before.num_steps + 1, before.num_seqs + num_seqs, before.num_tokens + num_tokens
        )

    # -- arrivals --------------------------------------------------------------------------------

    def _engine_init(self, event: ev.EngineInit) -> None:
        self._has_prefix_cache = event.enable_prefix_caching
        self._token_budget = event.max_num_batched_tokens

    def _engine_ready(self, event: ev.EngineReady) -> None:
        self._sums.num_blocks = event.num_kvcache_blocks
        self._is_led = False

    def _request_enqueue(self, event: ev.RequestEnqueue) -> None:
        self._sums.num_requests += 1
        if self._first_arrival_ns is None:
            self._first_arrival_ns = event.ts_ns
        self._lives[event.seq_id] = _Life(event.seq_id, event.prompt_len, event.ts_ns)

    def _request_refused(self, _event: ev.RequestRefused) -> None:
        self._sums.num_refused += 1

    # -- admission and preemption ----------------------------------------------------------------

    def _state_transition(self, event: ev.StateTransition) -> list[RequestMetrics] | None:
        life = self._lives[event.seq_id]
        if event.status == "RUNNING":
            self._admitted[event.seq_id] = life.scheduled_ns is None
            if life.scheduled_ns is None:
                life.scheduled_ns = event.ts_ns
            life.resume(event.ts_ns)
        elif event.status == "WAITING":
            life.preempted_at_ns = event.ts_ns
        elif event.status != "FINISHED":
            return None
        elif event.step is None:  # aborted between two steps
            return self._end([event.seq_id], event.ts_ns, event.reason)
        else:
            self._ending[event.seq_id] = event.reason
        return None

    def _preempt(self, event: ev.Preempt) -> None:
        life = self._lives[event.seq_id]
        life.num_preemptions += 1
        life.num_given_up = event.num_tokens_to_recompute
        self._sums.num_preemptions += 1

    def _schedule(self, event: ev.SchedulePrefill | ev.ScheduleMixed) -> None:
        for seq_id, num_cached in zip(event.seq_ids, event.num_cached_tokens, strict=True):
            if seq_id not in self._admitted:
                continue
            life = self._lives[seq_id]
            if self._admitted.pop(seq_id):
                life.num_cached_tokens = num_cached
                if self._has_prefix_cache:
                    self._sums.prefix_cache_queries += life.num_prompt_tokens
                    self._sums.prefix_cache_hits += num_cached
            else:
                num_lost = max(life.num_given_up - num_cached, 0)
                life.num_recomputed_tokens += num_lost
                self._sums.num_recomputed_tokens += num_lost
        self._count_blocks(event)

    def _count_blocks(
        self, event: ev.SchedulePrefill | ev.ScheduleMixed | ev.ScheduleDecode
    ) -> None:
        num_used = self._sums.num_blocks - event.free_blocks
        self._num_schedules += 1
        self._sum_blocks_used += num_used
        self._sums.max_blocks_used = max(self._sums.max_blocks_used or 0, num_used)

    # -- tokens and ends -------------------------------------------------------------------------

    def _sample_tokens(self, event: ev.SampleTokens) -> None:
        self._drawn = event.seq_ids

    def _cudagraph_replay(self, event: ev.CudagraphReplay) -> None:
        self._sums.num_graph_rows += event.graph_batch_size
        self._sums.num_graph_padding += event.padding

    def _step_end(self, event: ev.StepEnd) -> list[RequestMetrics]:
        now = self._last_end_ns = event.ts_ns
        self._count_step(event)
        self._count_tokens(now)
        ended = []
        for seq_id, reason in self._ending.items():
            ended += self._end([seq_id], now, reason)
        self._forget_step()
        return ended

    def _count_tokens(self, now: int) -> None:
        """Count the tokens sampled in this step."""
        self._sums.num_generation_tokens += len(self._drawn)
        gaps: Counter[int] = Counter()  # most gaps of a batch are equal
        for seq_id in self._drawn:
            life = self._lives[seq_id]
            if life.token_ns:
                gaps[now - life.token_ns[-1]] += 1
            else:
                self._sums.num_prompt_tokens += life.num_prompt_tokens
                self._distributions["time_to_first_token_ns"].add(now - life.arrival_ns)
            life.token_ns.append(now)
        for gap, count in gaps.items():
            self._distributions["inter_token_latency_ns"].add(gap, count)

    def _count_step(self, event: ev.StepEnd) -> None:
        before = self._phases.get(event.batch_phase, PhaseMetrics())
        has_gpu_time = event.gpu_ns is not None or before.gpu_ns is not None
        self._phases[event.batch_phase] = PhaseMetrics(
            before.num_steps + 1,
            before.num_seqs + event.num_seqs,
            before.num_tokens + event.num_batched_tokens,
            before.wall_ns + event.wall_ns,
            (before.gpu_ns or 0) + (event.gpu_ns or 0) if has_gpu_time else None,
        )
        if event.batch_phase != "prefill":
            self._sums.largest_batch = max(self._sums.largest_batch, event.num_seqs)

    def _engine_reset(self, event: ev.EngineReset) -> list[RequestMetrics]:
        """End all requests after an error; tokens of the failed step do not count."""
        self._forget_step()
        there = [seq_id for seq_id in event.seq_ids if seq_id in self._lives]
        return self._end(there, event.ts_ns, "aborted")

    def _forget_step(self) -> None:
        self._admitted, self._drawn, self._ending = {}, [], {}

    def _end(self, seq_ids: Iterable[int], now: int, reason: str) -> list[RequestMetrics]:
        ended = [self._lives.pop(seq_id).end(now, reason) for seq_id in seq_ids]
        if reason == "aborted":
            self._sums.num_aborted += len(ended)
            return ended
        self._sums.num_finished += len(ended)
        for request in ended:
            for name in _LIFE_METRICS:
                value = getattr(request, name)
                if value is not None:
                    self._distributions[name].add(round(value))
        return ended

    _handlers: ClassVar[dict[type, Callable[[Measure, Any], list[RequestMetrics] | None]]] = {
        Header: _header,
        ev.PreparePrefillTensors: _layout,
        ev.PrepareDecodeTensors: _layout,
        ev.EngineInit: _engine_init,
        ev.EngineReady: _engine_ready,
        ev.RequestEnqueue: _request_enqueue,
        ev.RequestRefused: _request_refused,
        ev.StateTransition: _state_transition,
        ev.Preempt: _preempt,
        ev.SchedulePrefill: _schedule,
        ev.ScheduleMixed: _schedule,
        ev.ScheduleDecode: _count_blocks,
        ev.SampleTokens: _sample_tokens,
        ev.CudagraphReplay: _cudagraph_replay,
        ev.StepEnd: _step_end,
        ev.EngineReset: _engine_reset,
    }


def _name(record: Record) -> str:
    return f"event {record.event_id}" if isinstance(record, ev.Event) else "a record"
