"""Deferring Ctrl-C (SIGINT, a KeyboardInterrupt in the main thread) while it would do harm."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C until the end of the `with` statement.

    In a thread other than the main one this does nothing: Python interrupts only the main thread.
    """
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGINT)
    if before is None or before is signal.SIG_IGN:  # None: a handler that is not Python's
        yield
        return
    is_asked = False

    def note(*_signal_and_frame: object) -> None:
        nonlocal is_asked
        is_asked = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if is_asked:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread. A process that is started in it begins with SIGINT blocked."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
