"""Prometheus: the totals of a run, in the text format that Prometheus scrapes.

Names are vLLM's with `nvtrace_` instead of `vllm:` (docs.vllm.ai, "Production Metrics"), and
so are the labels `model_name`, `engine` (the rank) and `finished_reason`: a dashboard made for vLLM
needs its prefix changed. Gauges are those of the trace's last step, which for a finished run are 0;
the largest value of the whole run is in `..._peak`. Histograms are of the requests that ended, with
buckets 1, 2, 5, 10 ... from 100 us to 1000 s, or from 1 to 1,000,000 tokens.

A sample's value is a double: Prometheus rounds numbers above 2^53. The format's version is 0.0.4.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from math import isfinite, isnan
from typing import TYPE_CHECKING

from nvtrace import events as ev
from nvtrace.envelope import Header
from nvtrace.export.otlp import FINISH_REASONS
from nvtrace.measure import Measure

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nvtrace.envelope import Record
    from nvtrace.metrics import RequestMetrics, RunMetrics

_NS_PER_S = 1e9
_SECONDS = tuple(float(f"{digit}e{power}") for power in range(-4, 3) for digit in (1, 2, 5))
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_TIMES = {  # histogram -> the request's metric
    "time_to_first_token_seconds": "time_to_first_token_ns",
    "request_time_per_output_token_seconds": "time_per_output_token_ns",
    "request_queue_time_seconds": "request_queue_time_ns",
    "request_prefill_time_seconds": "request_prefill_time_ns",
    "request_decode_time_seconds": "request_decode_time_ns",
    "request_inference_time_seconds": "request_inference_time_ns",
    "e2e_request_latency_seconds": "e2e_request_latency_ns",
}
_COUNTS = {
    "request_prompt_tokens": "num_prompt_tokens",
    "request_generation_tokens": "num_generation_tokens",
}
_HELP = {
    "run_info": "The run: its id and when it began; always 1.",
    "num_requests_running": "Requests in the running queue at the end of the last step.",
    "num_requests_waiting": "Requests in the waiting queue at the end of the last step.",
    "kv_cache_usage_perc": "Share of the KV blocks in use at the end of the last step; 1 is all.",
    "num_requests_running_peak": "Most requests in the running queue in any step.",
    "num_requests_waiting_peak": "Most requests in the waiting queue in any step.",
    "kv_cache_usage_perc_peak": "Largest share of the KV blocks in use in any step; 1 is all.",
    "prompt_tokens_total": "Prompt tokens of the requests that got a first token.",
    "generation_tokens_total": "Tokens generated.",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits_total": "Prompt tokens found in the prefix cache.",
    "num_preemptions_total": "Preemptions.",
    "request_success_total": "Requests that ended, by reason.",
    "time_to_first_token_seconds": "Time from a request's arrival to its first token.",
    "request_time_per_output_token_seconds": "Mean time between the tokens of a request.",
    "request_queue_time_seconds": "Time from a request's arrival to its first admission.",
    "request_prefill_time_seconds": "Time from a request's first admission to its first token.",
    "request_decode_time_seconds": "Time from a request's first token to its end.",
    "request_inference_time_seconds": "Time from a request's first admission to its end.",
    "e2e_request_latency_seconds": "Time from a request's arrival to its end.",
    "inter_token_latency_seconds": "Time between two tokens of a request.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens generated for a request.",
    "request_params_max_tokens": "max_tokens of a request.",
    "iteration_tokens_total": "Tokens computed in a step.",
}


class Histogram:
    """Values in buckets.

    Args:
        bounds: the largest value of each bucket, ascending; one more takes what is larger.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = (*bounds, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Take in a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, name: str, labels: dict[str, str]) -> Iterator[str]:
        """Its lines; each bucket includes those below it, as the format requires."""
        for bound, count in zip(self._bounds, accumulate(self._counts), strict=True):
            yield _sample(f"{name}_bucket", {**labels, "le": _number(bound)}, count)
        yield _sample(f"{name}_sum", labels, self._sum)
        yield _sample(f"{name}_count", labels, sum(self._counts))


class _Totals:
    """What is collected over a trace, besides its metrics."""

    def __init__(self) -> None:
        self.header: Header | None = None
        self.last_step: ev.StepEnd | None = None
        self.peaks = {"num_requests_running_peak": 0, "num_requests_waiting_peak": 0}
        self.model = ""
        self.num_blocks = 0
        self.reasons = Counter(dict.fromkeys(FINISH_REASONS.values(), 0))
        self.histograms = {name: Histogram(_SECONDS) for name in _TIMES}
        self.histograms["inter_token_latency_seconds"] = Histogram(_SECONDS)
        names = (*_COUNTS, "request_params_max_tokens", "iteration_tokens_total")
        self.histograms |= {name: Histogram(_TOKENS) for name in names}

    def take(self, record: Record) -> None:
        if isinstance(record, (*ev.SCHEDULES, ev.StepEnd)):
            lengths = (record.running_len, record.waiting_len)
            for name, length in zip(self.peaks, lengths, strict=True):
                self.peaks[name] = max(self.peaks[name], length)
        match record:
            case Header():
                self.header = record
            case ev.EngineInit():
                self.model = record.model
            case ev.EngineReady():
                self.num_blocks = record.num_kvcache_blocks
            case ev.RequestEnqueue():
                self.histograms["request_params_max_tokens"].add(record.max_tokens)
            case ev.StepEnd():
                self.last_step = record
                self.histograms["iteration_tokens_total"].add(record.num_batched_tokens)
            case _:
                pass

    def end(self, request: RequestMetrics) -> None:
        """A request has ended."""
        reason = request.finish_reason
        self.reasons[FINISH_REASONS.get(reason, reason)] += 1
        for name, metric in _TIMES.items():
            value = getattr(request, metric)
            if value is not None:
                self.histograms[name].add(value / _NS_PER_S)
        for gap in request.inter_token_latencies_ns:
            self.histograms["inter_token_latency_seconds"].add(gap / _NS_PER_S)
        for name, metric in _COUNTS.items():
            self.histograms[name].add(getattr(request, metric))


def lines(records: Iterable[Record]) -> Iterator[str]:
    """The lines of the exposition, after the trace has been read.

    Args:
        records: what `read_trace` yields.

    Raises:
        InconsistentTraceError: an event is about a request that never arrived.
    """
    measure, totals = Measure(), _Totals()
    for record in records:
        totals.take(record)
        for request in measure.apply(record):
            totals.end(request)
    rank = 0 if totals.header is None else totals.header.rank
    labels = {"model_name": totals.model, "engine": str(rank)}
    if totals.header is not None:
        run = {"run_id": totals.header.run_id, "created": totals.header.created}
        yield from _metric("run_info", "gauge", [({**labels, **run}, 1)])
    run_metrics = measure.run()
    for name, value in _gauges(totals, run_metrics).items():
        yield from _metric(name, "gauge", [(labels, value)])
    for name, number in _counters(run_metrics).items():
        yield from _metric(name, "counter", [(labels, number)])
    reasons = [({**labels, "finished_reason": key}, n) for key, n in totals.reasons.items()]
    yield from _metric("request_success_total", "counter", reasons)
    for name, histogram in totals.histograms.items():
        yield from _family(name, "histogram")
        yield from histogram.samples(f"nvtrace_{name}", labels)


def _gauges(totals: _Totals, run: RunMetrics) -> dict[str, float]:
    step = totals.last_step
    if step is None:
        return {}
    gauges: dict[str, float] = {
        "num_requests_running": step.running_len,
        "num_requests_waiting": step.waiting_len,
        **totals.peaks,
    }
    if totals.num_blocks:
        gauges["kv_cache_usage_perc"] = 1 - step.free_blocks / totals.num_blocks
        gauges["kv_cache_usage_perc_peak"] = (run.max_blocks_used or 0) / totals.num_blocks
    return gauges


def _counters(run: RunMetrics) -> dict[str, int]:
    return {
        "prompt_tokens_total": run.num_prompt_tokens,
        "generation_tokens_total": run.num_generation_tokens,
        "prefix_cache_queries_total": run.prefix_cache_queries,
        "prefix_cache_hits_total": run.prefix_cache_hits,
        "num_preemptions_total": run.num_preemptions,
    }


def _family(name: str, kind: str) -> Iterator[str]:
    yield f"# HELP nvtrace_{name} {_HELP[name]}"
    yield f"# TYPE nvtrace_{name} {kind}"


def _metric(name: str, kind: str, samples: Sequence[tuple[dict[str, str], float]]) -> Iterator[str]:
    yield from _family(name, kind)
    for labels, value in samples:
        yield _sample(f"nvtrace_{name}", labels, value)


def _sample(name: str, labels: dict[str, str], value: float) -> str:
    pairs = ",".join(f'{key}="{_label(text)}"' for key, text in labels.items())
    return f"{name}{{{pairs}}} {_number(value)}"


def _label(text: str) -> str:
    r"""A label's value in the format's quoting; control characters are escaped, such as \x1b."""
    spelled = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
    return spelled.replace("\\", "\\\\").replace('"', '\\"')


def _number(value: float) -> str:
    if not isfinite(value):
        return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(value)
