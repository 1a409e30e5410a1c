"""The progress bar of `generate`: tqdm's, on stderr, if that is a terminal.

Of the processes that torchrun starts, only rank 0 shows it.
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
    """Show a bar from 0 to `total`. Yields a function that advances it by a number."""
    if (
        not shows
        or os.environ.get("RANK", "0") != "0"
        or getattr(sys.stderr, "closed", True)
        or not sys.stderr.isatty()
    ):
        yield lambda _number: None
        return
    from tqdm import tqdm  # noqa: PLC0415 - seldom needed

    # Without tqdm's own lock and thread: they would set the start method of multiprocessing.
    bar_class: Any = type("Bar", (tqdm,), {"_lock": RLock(), "monitor_interval": 0})
    with bar_class(total=total, desc="Requests", dynamic_ncols=True) as bar:
        yield bar.update
