"""Stderr: messages must never stop a command.

Stderr may be missing, closed, or a pipe whose reader is gone. Imports nothing heavy: every
command's `--help` loads it.
"""

from __future__ import annotations

import io
import os
import sys

from typing_extensions import override

_MOST_CHARACTERS = 1000


class Stderr(io.TextIOBase):
    """The current `sys.stderr`; does nothing if there is none, or after its first failure."""

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
    """Print one line on stderr; control characters and line breaks are escaped.

    A very long line is cut.
    """
    from nvtrace_cli.views.text import escape  # noqa: PLC0415 - --help says nothing

    stream = Stderr()
    told = line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."
    stream.write(escape(told) + "\n")
    stream.flush()


def fill_missing_streams() -> None:
    """Open standard streams that the process was started without, so that writing works."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - stays open
