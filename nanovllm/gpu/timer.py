"""GpuTimer: how long a GPU works on a step, without ever waiting for it.

A GPU works behind the host's back: the time that a launch takes on the host says nothing of it. So
a mark is put into the GPU's own queue before the step's kernels and one behind them, and the time
between the two is read once the step's tokens have come, when both must have been passed:

    host   | launch |  waits for tokens   | reads the marks
    GPU        (mark | the step's kernels | mark) tokens ->

Knows marks (CUDA events). Does not look at the host's clock.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import Self


class Stretch:
    """One stretch of work, between two marks: `with stretch: launch()`. It can be used again."""

    def __init__(self) -> None:
        make_mark: Callable[..., torch.cuda.Event] = torch.cuda.Event
        self.first, self.last = make_mark(enable_timing=True), make_mark(enable_timing=True)

    def __enter__(self) -> Self:
        self.first.record()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.last.record()

    def elapsed_ns(self) -> int | None:
        """Nanoseconds between the marks; None if the GPU has not passed them yet."""
        if not self.last.query():  # type: ignore[no-untyped-call]
            return None
        milliseconds: float = self.first.elapsed_time(self.last)
        return round(milliseconds * 1e6)


class GpuTimer:
    """Measures steps, of which one may be launched before the one before it has been read.

    Args:
        device: what does the work; a CPU has no queue, and nothing to measure.
    """

    def __init__(self, device: torch.device) -> None:
        self._stretches = [Stretch(), Stretch()] if device.type == "cuda" else []
        self.launched: Stretch | None = None  # what was measured last

    def measuring(self) -> AbstractContextManager[object]:
        """Measure what is launched within this, if a GPU does it."""
        return self.next_stretch() if self._stretches else nullcontext()

    def next_stretch(self) -> Stretch:
        """The stretch to measure next: the one that was not measured last. A GPU's only."""
        self.launched = self._stretches[self.launched is self._stretches[0]]
        return self.launched
