"""Rows: the figures of several runs, side by side.

A recorded run's times are measured; a re-run's are simulated, and None where they are unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nvtrace.metrics import PhaseMetrics, refusals_of

if TYPE_CHECKING:
    from nvtrace.metrics import Refusals, RunMetrics
    from nvtrace.steptime import OutOfRange
    from nvtrace.whatif.recording import Recording
    from nvtrace.whatif.rerun import RerunResult


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run. Times are in nanoseconds.

    Attributes:
        name: "recorded", "unchanged", or the settings that are not as recorded.
        mode: whether its times were measured or simulated.
        num_steps, num_prefill_steps, num_decode_steps, num_mixed_steps: steps, in all and by kind;
            these and the next are None for a run that was stopped.
        num_preemptions: how often a request was preempted.
        prefix_cache_hits: prompt tokens that the cache had at first admissions.
        mean_batch: sequences in a decode or mixed step; in any step, if there is none of these.
        num_refused: requests that were refused; `refusals`: why.
        num_generation_tokens: tokens generated.
        duration_ns: from the first arrival to the end of the last step.
        ttft_p50_ns, ttft_p95_ns: time to first token.
        output_throughput: generated tokens per second.
        num_untimed: steps whose time is unknown; if there are any, all times are None.
        beyond: why they are unknown.
        num_left_out: requests left out: they were refused, so their prompts are not in the trace.
    """

    name: str
    mode: Literal["measured", "simulated"]
    num_steps: int | None = None
    num_prefill_steps: int | None = None
    num_decode_steps: int | None = None
    num_mixed_steps: int | None = None
    num_preemptions: int | None = None
    prefix_cache_hits: int | None = None
    mean_batch: float | None = None
    num_refused: int | None = None
    num_generation_tokens: int | None = None
    duration_ns: int | None = None
    ttft_p50_ns: float | None = None
    ttft_p95_ns: float | None = None
    output_throughput: float | None = None
    num_untimed: int = 0
    beyond: tuple[OutOfRange, ...] = ()
    num_left_out: int = 0
    refusals: tuple[Refusals, ...] = ()


def recorded_row(recording: Recording) -> RunRow:
    """The recorded run, as it was measured."""
    metrics, refused = recording.metrics, recording.refused
    facts = _decisions(metrics) | _times(metrics)
    return RunRow("recorded", "measured", **facts, refusals=tuple(refusals_of(refused)))


def simulated_row(name: str, outcome: RerunResult) -> RunRow:
    """A re-run."""
    return RunRow(
        name,
        "simulated",
        **({} if outcome.is_stopped else _decisions(outcome.metrics)),
        **({} if outcome.num_untimed else _times(outcome.metrics)),
        num_untimed=outcome.num_untimed,
        beyond=tuple(outcome.beyond),
        num_left_out=outcome.num_left_out,
        refusals=tuple(refusals_of(outcome.refused)),
    )


def _decisions(metrics: RunMetrics) -> dict[str, Any]:
    phases = metrics.phases
    steps = {phase: phases.get(phase, PhaseMetrics()) for phase in ("prefill", "decode", "mixed")}
    batches = [steps["decode"], steps["mixed"]]
    if not any(phase.num_steps for phase in batches):
        batches = [steps["prefill"]]
    num_batches = sum(phase.num_steps for phase in batches)
    return {
        "num_steps": sum(phase.num_steps for phase in steps.values()),
        "num_prefill_steps": steps["prefill"].num_steps,
        "num_decode_steps": steps["decode"].num_steps,
        "num_mixed_steps": steps["mixed"].num_steps,
        "num_preemptions": metrics.num_preemptions,
        "prefix_cache_hits": metrics.prefix_cache_hits,
        "mean_batch": sum(p.num_seqs for p in batches) / num_batches if num_batches else None,
        "num_refused": metrics.num_refused,
        "num_generation_tokens": metrics.num_generation_tokens,
    }


def _times(metrics: RunMetrics) -> dict[str, Any]:
    spread = metrics.time_to_first_token_ns
    return {
        "duration_ns": metrics.duration_ns,
        "ttft_p50_ns": None if spread is None else spread.p50,
        "ttft_p95_ns": None if spread is None else spread.p95,
        "output_throughput": metrics.output_throughput,
    }
