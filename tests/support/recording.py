"""Recording: a workload recorded into memory, with the engine's own word beside the trace's.

Knows when to look at the engine, and how to break it in the middle of a step. Does not know how a
trace is folded (`nvtrace.replay`), but that its fold must be the engine.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import pytest

from nvtrace import events as ev
from nvtrace.pipeline import Sink
from nvtrace.reader import read_trace
from nvtrace.recorder import Recorder
from nvtrace.replay import State
from support.fake_runner import InjectedError, Settings, make_engine, runner_of
from support.snapshot import Snapshot, snapshot_of_engine, snapshot_of_fold
from support.workload import MemoryFile, Request, Run, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanovllm.engine.batch import Batch
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.observer import Observer
    from nvtrace.envelope import Record
    from support.fake_runner import Moment

Point = Literal["schedule", "postprocess", "reset"]

# Two of a kind and one of another, a pool too small for all, chunks: something of everything.
BUSY = Workload(
    Settings(
        kvcache_block_size=2, num_kvcache_blocks=8, max_num_batched_tokens=6, max_model_len=16
    ),
    [
        Request([1, 2, 1, 2, 1], max_tokens=6),
        Request([1, 2, 1, 2, 1], max_tokens=8),
        Request([2, 1, 2, 1, 2, 1, 2], max_tokens=7, arrival=2),
        Request([1, 2, 1, 2, 2], max_tokens=5, arrival=4),
        Request([1] * 20, max_tokens=1, arrival=1),
        Request([1, 2], max_tokens=9, arrival=3, abort=6),
    ],
)


BUSY_MIXED = replace(BUSY, settings=replace(BUSY.settings, policy="mixed"))


@dataclass(slots=True)
class Interruption:
    """An exception in a step: at one of the runner's moments, or in a hook of the observer."""

    step: int
    at: str
    is_noted: bool = False  # the hook noted its event before

    def __str__(self) -> str:
        return f"{'after' if self.is_noted else 'at'} {self.at}"


HOOKS_OF_A_STEP = (
    *("admission_stop", "schedule_prefill", "schedule_decode", "schedule_mixed"),
    *("preempt", "state_transition"),
    *("blocks_share", "blocks_revive", "blocks_allocate", "blocks_append"),
    *("blocks_hash", "blocks_evict", "blocks_release"),
    *("prepare_prefill_tensors", "prepare_decode_tensors", "run_eager", "sample_tokens"),
)


class Recording:
    """A workload that was recorded into memory, and what the engine was at each point.

    Attributes:
        run: the workload's run, over.
        points: the engine's own snapshots, in order.
        data: the trace.
        records: what it says.
    """

    def __init__(
        self,
        workload: Workload,
        interruption: Interruption | None = None,
        make: Callable[[Settings, Observer | None], LLMEngine] = make_engine,
    ) -> None:
        self.points: list[tuple[Point, Snapshot]] = []
        self._interruption = interruption
        self._num_resets = 0
        file = MemoryFile()
        recorder = Recorder(Sink(file))
        self.run = Run(workload, recorder, make)
        if interruption is not None and hasattr(recorder, interruption.at):
            self._arm(recorder, interruption.at)
        runner_of(self.run.engine).at = self._at
        self.run.go(self._after_step)
        recorder.close()
        self.data = file.contents
        self.records: list[Record] = list(read_trace(io.BytesIO(self.data), warn=pytest.fail))

    def _arm(self, recorder: Recorder, hook: str) -> None:
        original = getattr(recorder, hook)

        def interrupted(*args: object) -> None:
            what = self._interruption
            if what is not None and what.is_noted:
                original(*args)
            self._strike(hook)
            if what is None or not what.is_noted:
                original(*args)

        setattr(recorder, hook, interrupted)

    def _strike(self, at: str) -> None:
        what = self._interruption
        if not self.run.is_in_step or what is None:
            return
        if what.at == at and self.run.num_steps >= what.step:
            self._interruption = None
            raise InjectedError(f"{what} in step {self.run.num_steps}")

    def _at(self, moment: Moment, _batch: Batch) -> None:
        if moment == "scheduled":
            self._take("schedule")
        self._strike(moment)

    def _after_step(self) -> None:
        self._take("postprocess" if self.run.num_resets == self._num_resets else "reset")
        self._num_resets = self.run.num_resets

    def _take(self, point: Point) -> None:
        scheduler = self.run.engine.scheduler
        self.points.append((point, snapshot_of_engine(scheduler, self.run.sequences)))


def _point_after(record: Record) -> Point | None:
    """The point in the engine's life that comes right after `record`."""
    match record:
        case ev.SchedulePrefill() | ev.ScheduleDecode() | ev.ScheduleMixed():
            return "schedule"
        case ev.StepEnd():
            return "postprocess"
        case ev.EngineReset():
            return "reset"
        case _:
            return None


def assert_fold_equals_engine(recording: Recording) -> None:
    """The strongest test in the house: the trace's fold is the engine, at each of its points."""
    points = iter(recording.points)
    state = State()
    for record in recording.records:
        state.apply(record)
        point = _point_after(record)
        if point is not None:
            if (expected := next(points, None)) is None:
                pytest.fail(f"the engine was at no point that follows {record}")
            if point == "schedule" and expected[0] == "reset":  # struck before the runner began
                points = iter([expected, *points])
                continue
            assert (point, snapshot_of_fold(state)) == expected
    assert next(points, None) is None, "the trace ends before the engine did"
    at_the_end = snapshot_of_engine(recording.run.engine.scheduler, recording.run.sequences)
    assert snapshot_of_fold(state) == at_the_end
