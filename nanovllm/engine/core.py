"""EngineCore: one step of an engine: schedule -> run -> postprocess.

`LLMEngine` calls it until no request is left.

    scheduler.schedule()      -> Batch      which sequences compute how many tokens in this step
    runner.launch(batch)      -> Launched   the device begins; token_ids() waits for it
    scheduler.postprocess()   -> the sequences that ended

A runner computes batches: with the model (`model_runner.py`), from the tokens of a recorded run
(`nvtrace.whatif`), or with a fake model in the tests. This module imports no torch. vLLM's
counterpart is `vllm/v1/engine/core.py`.

There are two ways to run a step, with the same results. `step` is the simple one. `step_ahead` is
for a GPU: it launches the next step before the host has ended this one, if possible before its
tokens are known, so that the GPU need not wait:

    GPU     |    step n    |   step n + 1   |
    host     launches n + 1, waits for n, postprocesses n, schedules n + 1, launches n + 2 ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nanovllm.gpu.run_ahead import NextStep, predict_next_step

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from nanovllm.engine.batch import Batch
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.engine.sequence import Sequence
    from nanovllm.observer import Observer


class Launched:
    """A step that was launched.

    This base class is for a step that was computed when `launch` returned; `GraphStep`
    (gpu/cuda_graphs.py) is for one that still runs.

    Args:
        token_ids: one token for each of the batch's `sampled_seqs`.
        gpu_ns: how long the GPU was busy with it, nanoseconds; None without a GPU.
    """

    def __init__(self, token_ids: list[int], gpu_ns: int | None = None) -> None:
        self._token_ids = token_ids
        self._gpu_ns = gpu_ns

    @property
    def can_be_followed(self) -> bool:
        """Can the next step be launched before this step's tokens are known?"""
        return False

    def token_ids(self) -> list[int]:
        """Wait for the step. Returns one token for each of the batch's `sampled_seqs`."""
        return self._token_ids

    def gpu_ns(self) -> int | None:
        """How long the GPU was busy with it, once `token_ids` has returned; None without a GPU."""
        return self._gpu_ns

    def launch_next(self, next_step: NextStep) -> Launched | None:
        """Launch the predicted next step after this one; None if that is not possible."""
        raise NotImplementedError

    def is_step_of(self, batch: Batch) -> bool:
        """Make this step, which was launched ahead, the step of `batch`. False if it cannot be.

        It may have computed more: rows of sequences that have ended since are dropped.
        """
        raise NotImplementedError


class Runner(Protocol):
    """What the loop needs from a runner.

    Attributes:
        runs_ahead: can a step be launched before the tokens of the previous one are known?
    """

    runs_ahead: bool

    def launch(self, batch: Batch, engine_step: int) -> Launched:
        """Start to compute a batch. A GPU may still be busy when this returns."""
        ...


class EngineCore:
    """A scheduler and a runner, run step by step.

    Args:
        scheduler: chooses the batch of each step.
        runner: computes it.
        find_stopped: decodes the sampled tokens, and returns the sequences whose text has reached a
            stop string. In an engine, `OutputProcessor.process`.
        observer: called at each stage of a step.

    Attributes:
        engine_step: how many steps have begun.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        find_stopped: Callable[[list[Sequence], list[int]], Container[Sequence]],
        observer: Observer,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.find_stopped = find_stopped
        self.observer = observer
        self.engine_step = 0
        self._ahead: Launched | None = None  # the next step, if it was launched already

    def step(self) -> list[Sequence]:
        """Run one step. Returns the sequences that ended in it."""
        batch = self._schedule()
        launched = self.runner.launch(batch, self.engine_step)
        token_ids = launched.token_ids()
        return self._postprocess(batch, launched, token_ids)

    def step_ahead(self) -> list[Sequence]:
        """As `step`, but also launch the next step, as soon as it can be predicted."""
        batch = self._schedule()
        launched = self._take_ahead(batch) or self.runner.launch(batch, self.engine_step)
        self._launch_next(batch, launched)
        token_ids = launched.token_ids()
        if self._ahead is None:  # with the tokens, it may be possible to predict it
            self._launch_next(batch, launched, token_ids)
        return self._postprocess(batch, launched, token_ids)

    def _schedule(self) -> Batch:
        self.engine_step += 1
        self.observer.step_start(self.engine_step)
        return self.scheduler.schedule()

    def _postprocess(
        self, batch: Batch, launched: Launched, token_ids: list[int]
    ) -> list[Sequence]:
        gpu_ns = launched.gpu_ns()
        if gpu_ns is not None:
            self.observer.gpu_time(gpu_ns)
        if token_ids:  # none if the step computed only a part of one prompt
            self.observer.sample_tokens(batch.sampled_seqs, token_ids)
        stopped = self.find_stopped(batch.sampled_seqs, token_ids)
        finished = self.scheduler.postprocess(batch, token_ids, stopped)
        self.observer.step_end(batch, finished, self.scheduler)
        return finished

    def _take_ahead(self, batch: Batch) -> Launched | None:
        ahead, self._ahead = self._ahead, None
        return ahead if ahead is not None and ahead.is_step_of(batch) else None

    def _launch_next(
        self, batch: Batch, launched: Launched, token_ids: list[int] | None = None
    ) -> None:
        if launched.can_be_followed:
            next_step = predict_next_step(self.scheduler, batch, token_ids)
            if next_step is not None:
                self._ahead = launched.launch_next(next_step)
