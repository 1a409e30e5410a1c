"""Consoles and the few colours and glyphs that all views share.

rich itself respects NO_COLOR, and uses no colours if the output is not a terminal.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rich.console import Console
from rich.theme import Theme

from nvtrace_cli.stderr import Stderr

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO

THEME = Theme(
    {
        "label": "dim",
        "heading": "bold",
        "quiet": "dim",
        "waiting": "yellow",
        "prefill": "bold cyan",
        "decode": "green",
        "mixed": "magenta",
        "idle": "dim",
        "preempted": "bold red",
        "ended": "bold",
        "warning": "yellow",
        "error": "bold red",
    }
)


@dataclass(frozen=True, slots=True)
class Glyphs:
    """One character for each thing a request can be doing, and bars of rising height."""

    waiting: str
    idle: str
    decode: str
    ended: str
    prefill: str
    preempted: str
    bars: str
    times: str
    dot: str


LEAST_WIDTH = 40
_MOST_DIGITS = 4  # of a screen's size
UNICODE = Glyphs("·", "╌", "━", "●", "█", "x", "▁▂▃▄▅▆▇█", "×", "·")  # noqa: RUF001 - a times sign
ASCII = Glyphs(".", "-", "=", "o", "#", "x", "", "x", "-")


def make_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """A console for stdout or stderr. Text is never read as markup.

    On a terminal narrower than `LEAST_WIDTH`, lines have that width and the terminal wraps them:
    cut text would be lost.
    """
    console = Console(
        file=cast("TextIO", Stderr()) if stderr else None,
        stderr=stderr,
        width=width,
        theme=THEME,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=False,
        _environ=_sizes_that_can_be(os.environ),
    )
    console.width = max(console.width, LEAST_WIDTH)
    return console


def _sizes_that_can_be(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment, without impossible values of COLUMNS or LINES such as 0, -1, 10**9."""
    return {
        name: value
        for name, value in environment.items()
        if name not in {"COLUMNS", "LINES"}
        or (value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS and int(value))
    }


def glyphs(console: Console) -> Glyphs:
    """The glyphs that the console's encoding can show."""
    return UNICODE if console.encoding.startswith("utf") else ASCII


def is_terminal(*, stderr: bool = False) -> bool:
    """Is it a terminal? FORCE_COLOR does not count."""
    return (Stderr() if stderr else sys.stdout).isatty()
