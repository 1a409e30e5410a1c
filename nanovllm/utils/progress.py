"""The progress bar of `generate`, for a person who waits at a terminal.

Knows whether somebody looks: the bar is tqdm's, on stderr, and there is none if that is no
terminal. Of the processes that torchrun starts, rank 0 shows it. Does not know what advances.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress_bar(total: int, *, shows: bool) -> Iterator[Callable[[int], object]]:
    """Within this, a bar from 0 to `total`, advanced by calls of what is yielded."""
    if (
        not shows
        or os.environ.get("RANK", "0") != "0"
        or getattr(sys.stderr, "closed", True)
        or not sys.stderr.isatty()
    ):
        yield lambda _number: None
        return
    from tqdm import tqdm  # noqa: PLC0415 - seldom needed

    # Without tqdm's own lock and thread: they would settle how the caller's processes start.
    bar_class: Any = type("Bar", (tqdm,), {"_lock": RLock(), "monitor_interval": 0})
    with bar_class(total=total, desc="Requests", dynamic_ncols=True) as bar:
        yield bar.update
