"""The terminal in full-screen mode: keys arrive one by one, and the alternate screen is used.

However it ends (an exception, a signal, Ctrl-Z), the terminal is restored.

POSIX only: it needs `termios`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from nvtrace_cli.failures import UsageError
from nvtrace_cli.keys import KeyDecoder

try:
    import termios
    import tty
except ImportError as error:  # not POSIX
    raise UsageError(
        "replay --interactive needs a POSIX terminal (Linux, macOS, WSL), and this system has none"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"  # the alternate screen, no cursor, cleared
_LEAVE = "\x1b[0m\x1b[2J\x1b[?25h\x1b[?1049l"  # cleared, because a resize may keep some of it
_ESCAPE_SECONDS = 0.05  # the bytes of an arrow key arrive together; nothing follows a lone escape


def refuse_unless_terminal() -> None:
    """Refuse to run without a terminal for keys and screen.

    Raises:
        UsageError: saying what is missing.
    """
    for name, stream in (("stdin", sys.stdin), ("stdout", sys.stdout)):
        if stream is None or not stream.isatty():
            raise UsageError(f"--interactive needs a terminal, and {name} is not one")
    if os.environ.get("TERM", "dumb") in {"dumb", "unknown"}:
        raise UsageError(
            "--interactive draws on the whole screen, and this terminal (TERM) cannot do that"
        )


@contextmanager
def lent_terminal() -> Iterator[Terminal]:
    """Switch the terminal to full-screen mode, and restore it at the end."""
    terminal = Terminal()
    with terminal.watching_signals():
        terminal.enter()
        try:
            yield terminal
        finally:
            terminal.leave()


class Terminal:
    """Stdin and stdout in full-screen mode."""

    def __init__(self) -> None:
        self._stdin = sys.stdin.fileno()
        self._stdout = sys.stdout.fileno()
        self._modes = termios.tcgetattr(self._stdin)
        self._decoder = KeyDecoder()
        self._wake, self._woken = os.pipe()
        self._is_ours = False

    @property
    def size(self) -> tuple[int, int]:
        """(columns, rows) of the window now."""
        with suppress(OSError):
            columns, rows = os.get_terminal_size(self._stdout)
            if columns and rows:
                return columns, rows
        return 80, 24

    def read(self, timeout: float | None) -> list[str]:
        """The keys that were pressed; none after the timeout, or if the window size has changed.

        Args:
            timeout: seconds to wait for one; None waits for ever.

        Raises:
            EOFError: the terminal was closed.
        """
        if not self._wait(timeout):
            return []
        keys = self._feed()
        while self._decoder.is_waiting:
            keys += self._feed() if self._wait(_ESCAPE_SECONDS) else self._decoder.flush()
        return keys

    def _wait(self, timeout: float | None) -> bool:
        """Wait for input. Is there any?"""
        ready, _, _ = select.select([self._stdin, self._wake], [], [], timeout)
        if self._wake in ready:
            os.read(self._wake, 1024)
        return self._stdin in ready

    def _feed(self) -> list[str]:
        try:
            data = os.read(self._stdin, 1024)
        except OSError as error:  # closed
            raise EOFError("the terminal is gone") from error
        if not data:
            raise EOFError("the terminal is gone")
        return self._decoder.feed(data)

    # -- modes -----------------------------------------------------------------------------------

    def enter(self) -> None:
        """Switch to full-screen mode."""
        if not self._is_ours:
            self._is_ours = True
            tty.setcbreak(self._stdin, termios.TCSADRAIN)
            self._write(_ENTER)

    def leave(self) -> None:
        """Restore the terminal."""
        if self._is_ours:
            self._is_ours = False
            self._write(_LEAVE)
            with suppress(termios.error):  # closed
                termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._modes)

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # closed
            sys.stdout.flush()
            os.write(self._stdout, text.encode("ascii"))

    # -- signals ---------------------------------------------------------------------------------

    @contextmanager
    def watching_signals(self) -> Iterator[None]:
        """Handle a new window size, and Ctrl-Z."""
        handlers = {
            signal.SIGWINCH: _ignore,
            signal.SIGTSTP: self._suspend,
            signal.SIGCONT: self._resume,
        }
        os.set_blocking(self._woken, False)
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        waker = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(waker)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._wake)
            os.close(self._woken)

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        """Ctrl-Z: restore the terminal, then stop the process as usual."""
        self.leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)

    def _resume(self, _number: int, _frame: FrameType | None) -> None:
        """`fg`: switch to full-screen mode again."""
        signal.signal(signal.SIGTSTP, self._suspend)
        self._is_ours = False
        self.enter()


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass
