"""How a command ends: the exit codes, and the errors that carry one.

    0    done                        3    unreadable trace
    1    found something             4    trace newer than this tool
    2    wrong usage                 5    the run failed
    130  interrupted                 70   a fault of nvtrace itself
                                     74   stdout cannot be written (a full disk)

Imports nothing heavy: it is the first module of the command line that is loaded.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

USAGE = 2
UNREADABLE_TRACE = 3
NEWER_TRACE = 4
RUN_FAILED = 5
OWN_FAULT = 70
OUTPUT_FAILED = 74
INTERRUPTED = 130
_ENDS = ("SIGTERM", "SIGHUP", "SIGQUIT")  # not every system has all of them


class CommandError(Exception):
    """A failure with a message for the user.

    Attributes:
        exit_code: what the process ends with.
    """

    exit_code = OWN_FAULT


class UsageError(CommandError):
    """The options are wrong, or ask for something impossible."""

    exit_code = USAGE


class RunFailedError(CommandError):
    """The engine did not start, or did not finish."""

    exit_code = RUN_FAILED


def silence_stdout() -> None:
    """The reader of stdout is gone: keep the interpreter's last flush from raising."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())


@contextmanager
def no_stdout_is_no_failure() -> Iterator[None]:
    """Ignore errors of stdout while another error, the important one, is handled."""
    try:
        yield
        sys.stdout.flush()
    except (OSError, SystemExit):  # typer and rich turn a closed pipe into SystemExit
        silence_stdout()


@contextmanager
def interrupts_end_it() -> Iterator[None]:
    """Let Ctrl-C end the process with its exit code and without a traceback.

    For the time in which modules are loaded: nothing has started that must be finished.
    """
    is_main = (
        threading.current_thread() is threading.main_thread()
    )  # only the main thread may install handlers
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # another handler is installed, or the signal is ignored
        return
    signal.signal(signal.SIGINT, lambda _signal, _frame: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Ended(BaseException):
    """A signal asks the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def tidy_ends() -> Iterator[None]:
    """Before a signal ends the process, run the cleanup of the block.

    Then the process ends by that signal. Ignored signals stay ignored, as under nohup.
    """
    if threading.current_thread() is not threading.main_thread():  # others install no handlers
        yield
        return
    numbers = [getattr(signal, name) for name in _ENDS if hasattr(signal, name)]
    caught = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, _frame: FrameType | None) -> None:
        for each in caught:  # a second signal must not interrupt the cleanup
            signal.signal(each, signal.SIG_IGN)
        raise _Ended(number)

    for number in caught:
        signal.signal(number, end)
    try:
        yield
    except _Ended as ended:
        signal.signal(ended.number, signal.SIG_DFL)
        os.kill(os.getpid(), ended.number)
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)
