"""GPUTimer: how long a GPU works on a step, without ever waiting for it.

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


class GPUTimer:
    """One stretch of work, between two marks: `with stretch: launch()`. It can be used again."""

    def __init__(self) -> None:
        make_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        self.start, self.end = make_event(enable_timing=True), make_event(enable_timing=True)

    def __enter__(self) -> Self:
        self.start.record()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.end.record()

    def elapsed_ns(self) -> int | None:
        """Nanoseconds between the marks; None if the GPU has not passed them yet."""
        if not self.end.query():  # type: ignore[no-untyped-call]
            return None
        milliseconds: float = self.start.elapsed_time(self.end)
        return round(milliseconds * 1e6)


def gpu_timer(device: torch.device) -> AbstractContextManager[GPUTimer | None]:
    """Measure what is launched within this; nothing on a CPU, which has no queue."""
    return GPUTimer() if device.type == "cuda" else nullcontext()
