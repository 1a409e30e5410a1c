"""Pace: how long steps of a group take, and whether one of them was slow.

A group is a phase and the CUDA graph's size; without a graph, a phase and the tokens computed,
rounded up to a power of two. A step is slow if it took more than HIGH_FACTOR times the median of
the other steps of its group, and is farther above it than HIGH_QUARTILES times the distance from
their median to their upper quartile, so that noise alone makes no step slow
(`Distribution.usual_limit`). The part that grew most over its own median is given as the cause; the
GPU, if its time grew by at least half of the step's growth, since the host then waited for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvtrace.distribution import Distribution
from nvtrace.explain.links import Paced, Part

if TYPE_CHECKING:
    from nvtrace import events as ev
    from nvtrace.events import Phase

HOST_PARTS = ("schedule", "prepare", "forward", "sample", "postprocess")
PARTS = (*HOST_PARTS, "gpu")


@dataclass(frozen=True, slots=True)
class StepGroup:
    """Steps that should take about the same time.

    Attributes:
        phase: prefill, decode or mixed.
        graph_batch_size: rows of the graph that was replayed; None without one.
        bucket: tokens computed, at most; None with a graph.
    """

    phase: Phase
    graph_batch_size: int | None
    bucket: int | None

    @classmethod
    def of(cls, end: ev.StepEnd, replay: ev.CudagraphReplay | None) -> StepGroup:
        """The group of a step, from its end and, if there was one, its replay."""
        if replay is not None:
            return cls(end.batch_phase, replay.graph_batch_size, None)
        return cls(end.batch_phase, None, 1 << max(end.num_batched_tokens - 1, 0).bit_length())


class Pace:
    """Takes in every step's end; memory grows only with the number of groups.

    Args:
        step: the step to compare with the others.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._times: dict[StepGroup, dict[str, Distribution]] = {}
        self._own: tuple[StepGroup, ev.StepEnd, bool] | None = None

    def take(self, end: ev.StepEnd, replay: ev.CudagraphReplay | None) -> None:
        """Take in a step's end."""
        group = StepGroup.of(end, replay)
        if end.step == self._step:
            self._own = group, end, group not in self._times
            return
        times = self._times.setdefault(group, {name: Distribution() for name in ("wall", *PARTS)})
        for name, distribution in times.items():
            value = getattr(end, f"{name}_ns")
            if value is not None:
                distribution.add(value)

    def verdict(self) -> Paced | None:
        """The step compared with the others; None if it did not end."""
        if self._own is None:
            return None
        group, end, is_first = self._own
        times = self._times.get(group, {})
        medians = {name: _median(times.get(name)) for name in ("wall", *PARTS)}
        median_ns = medians["wall"]
        limit_ns = times["wall"].usual_limit() if times else None
        is_slow = limit_ns is not None and end.wall_ns > limit_ns
        parts = {
            name: Part(time_ns=getattr(end, f"{name}_ns"), median_ns=medians[name])
            for name in PARTS
            if getattr(end, f"{name}_ns") is not None
        }
        spread = times["wall"].spread() if times else None
        return Paced(
            first_step=self._step,
            last_step=self._step,
            event_ids=(end.event_id,),
            phase=group.phase,
            graph_batch_size=group.graph_batch_size,
            bucket=group.bucket,
            wall_ns=end.wall_ns,
            median_ns=median_ns,
            limit_ns=limit_ns,
            num_others=0 if spread is None else spread.count,
            is_first=is_first,
            is_slow=is_slow,
            grown=_grown(parts, end.wall_ns - (median_ns or 0)) if is_slow else None,
            parts=parts,
        )


def _median(distribution: Distribution | None) -> float | None:
    spread = None if distribution is None else distribution.spread()
    return None if spread is None else spread.p50


def _grown(parts: dict[str, Part], growth_ns: float) -> str:
    """The part that made the step `growth_ns` slower than the median."""
    growth = {name: part.time_ns - (part.median_ns or 0) for name, part in parts.items()}
    if "gpu" in growth and 2 * growth["gpu"] >= growth_ns:
        return "gpu"
    return max(HOST_PARTS, key=lambda name: growth[name])
