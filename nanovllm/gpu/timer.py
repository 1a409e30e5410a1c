"""GPUTimer: how long a GPU works on a step, measured without waiting for it.

The time that a launch takes on the host is not the time on the GPU. So one CUDA event is recorded
before the step's kernels and one after them, and the time between the two is read after the step's
tokens have arrived on the host, when both events have completed:

    host   | launch |    waits for tokens    | reads the events
    GPU        (event | the step's kernels | event) tokens ->
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
    """Measures what is launched in `with timer:`. It can be used again."""

    def __init__(self) -> None:
        make_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        self.start, self.end = make_event(enable_timing=True), make_event(enable_timing=True)

    def __enter__(self) -> Self:
        self.start.record()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.end.record()

    def elapsed_ns(self) -> int | None:
        """Nanoseconds between the two events; None if the GPU has not completed them yet."""
        if not self.end.query():  # type: ignore[no-untyped-call]
            return None
        milliseconds: float = self.start.elapsed_time(self.end)
        return round(milliseconds * 1e6)


def gpu_timer(device: torch.device) -> AbstractContextManager[GPUTimer | None]:
    """Measure what is launched within this on a GPU; measures nothing on a CPU."""
    return GPUTimer() if device.type == "cuda" else nullcontext()
