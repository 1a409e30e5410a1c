"""Stderr, where what is said must never stop a command.

Knows that stderr may be missing, closed, or a pipe that nobody reads any more. Does not know what
is said. Imports nothing heavy: every command's `--help` loads it.
"""

from __future__ import annotations

import io
import os
import sys

from typing_extensions import override

_MOST_CHARACTERS = 1000


class Stderr(io.TextIOBase):
    """Today's `sys.stderr`; silent if there is none, and from its first failure on."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = sys.stderr  # None where a process is started without one

    @property
    @override
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute there
        return getattr(self._stream, "encoding", None) or "utf-8"

    @override
    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:  # closed
            return False

    @override
    def write(self, text: str) -> int:
        try:
            if self._stream is not None:
                self._stream.write(text)
        except (OSError, ValueError):
            self._stream = None
        return len(text)

    @override
    def flush(self) -> None:
        try:
            if self._stream is not None:
                self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


def tell(line: str) -> None:
    """One line on stderr; what could move a terminal's cursor or break the line is escaped.

    Of a line that quotes something without measure, the beginning is told.
    """
    from nvtrace_cli.views.text import escape  # noqa: PLC0415 - --help says nothing

    stream = Stderr()
    told = line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."
    stream.write(escape(told) + "\n")
    stream.flush()


def fill_missing_streams() -> None:
    """Open what the process was started without, so that everybody may write to it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - stays open
