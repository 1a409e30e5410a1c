"""Ctrl-C, held back where it would do harm.

Knows SIGINT and what Python makes of it: a KeyboardInterrupt in the main thread. Does not know what
is being protected.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C wait until the block is left, and strike then.

    Only the main thread is ever interrupted; in another one this does nothing.
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
    """Let no Ctrl-C reach this thread, nor a process that is started in it, before its own word."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
