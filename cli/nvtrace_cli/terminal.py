"""A terminal that is lent to us for a while: keys come one by one, and the screen is ours.

Knows modes, signals and the screen beside the scrollback. Does not know what a key means or what is
drawn. However it ends (an exception, a signal, Ctrl-Z), the terminal is given back as it was.

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
except ImportError as error:  # no POSIX
    raise UsageError(
        "replay --interactive needs a POSIX terminal (Linux, macOS, WSL), and this system has none"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"  # the other screen, no cursor, empty
_LEAVE = "\x1b[0m\x1b[2J\x1b[?25h\x1b[?1049l"  # what a resize may keep of it is empty
_ESCAPE_SECONDS = 0.05  # an arrow key's bytes come together; a lone escape has nothing after it


def refuse_unless_terminal() -> None:
    """Complain where nobody could press a key or see a screen.

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
    """Take the terminal, and give it back in the end."""
    terminal = Terminal()
    with terminal.watching_signals():
        terminal.enter()
        try:
            yield terminal
        finally:
            terminal.leave()


class Terminal:
    """Stdin and stdout, in our hands."""

    def __init__(self) -> None:
        self._stdin = sys.stdin.fileno()
        self._stdout = sys.stdout.fileno()
        self._modes = termios.tcgetattr(self._stdin)
        self._decoder = KeyDecoder()
        self._wake, self._woken = os.pipe()
        self._is_ours = False

    @property
    def size(self) -> tuple[int, int]:
        """(columns, rows), as they are now."""
        with suppress(OSError):
            columns, rows = os.get_terminal_size(self._stdout)
            if columns and rows:
                return columns, rows
        return 80, 24

    def read(self, timeout: float | None) -> list[str]:
        """The keys that were pressed; none if the time is over, or the window has changed.

        Args:
            timeout: seconds to wait for one; None waits for ever.

        Raises:
            EOFError: the terminal is gone.
        """
        if not self._wait(timeout):
            return []
        keys = self._feed()
        while self._decoder.is_waiting:
            keys += self._feed() if self._wait(_ESCAPE_SECONDS) else self._decoder.flush()
        return keys

    def _wait(self, timeout: float | None) -> bool:
        """Is there anything to read from the keyboard?"""
        ready, _, _ = select.select([self._stdin, self._wake], [], [], timeout)
        if self._wake in ready:
            os.read(self._wake, 1024)
        return self._stdin in ready

    def _feed(self) -> list[str]:
        try:
            data = os.read(self._stdin, 1024)
        except OSError as error:  # hung up
            raise EOFError("the terminal is gone") from error
        if not data:
            raise EOFError("the terminal is gone")
        return self._decoder.feed(data)

    # -- modes -----------------------------------------------------------------------------------

    def enter(self) -> None:
        """Take the screen and the keys."""
        if not self._is_ours:
            self._is_ours = True
            tty.setcbreak(self._stdin, termios.TCSADRAIN)
            self._write(_ENTER)

    def leave(self) -> None:
        """Give both back as they were."""
        if self._is_ours:
            self._is_ours = False
            self._write(_LEAVE)
            with suppress(termios.error):  # hung up
                termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._modes)

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # hung up
            sys.stdout.flush()
            os.write(self._stdout, text.encode("ascii"))

    # -- signals ---------------------------------------------------------------------------------

    @contextmanager
    def watching_signals(self) -> Iterator[None]:
        """Hear of a new window size, and of Ctrl-Z."""
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
        """Ctrl-Z: the shell gets its terminal, and we stop as if we had never heard of it."""
        self.leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)

    def _resume(self, _number: int, _frame: FrameType | None) -> None:
        """`fg`: the shell has set its own modes meanwhile."""
        signal.signal(signal.SIGTSTP, self._suspend)
        self._is_ours = False
        self.enter()


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass
