"""The command line under test: in this process, or in one of its own.

Knows how to call it and what comes back. Does not know what it should say.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len

from nvtrace_cli.main import run_command

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Outcome:
    """Run a command in this process, where stdout is no terminal."""
    capsys.readouterr()
    code = run_command([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return Outcome(code, captured.out, captured.err)


def environment(**changes: str) -> dict[str, str]:
    """This process's, with the sources on the path, 80 columns and English."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NVTRACE")}
    path = os.pathsep.join(str(ROOT / root) for root in (".", "trace", "cli"))
    fixed = {"PYTHONPATH": path, "COLUMNS": "80", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    return {**kept, **fixed, **changes}


def command(*arguments: str | Path) -> list[str]:
    """The command line for a process of its own."""
    return [sys.executable, "-m", "nvtrace_cli", *map(str, arguments)]


def spawn(*arguments: str | Path, stdin: bytes = b"", **changes: str) -> Outcome:
    """Run a command in a process of its own."""
    done = subprocess.run(
        command(*arguments),
        input=stdin,
        capture_output=True,
        env=environment(**changes),
        check=False,
        timeout=120,
    )
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_CUT = re.compile(r"\d\S*…|…\S*\d")


def misfits(text: str, wide: str, width: int) -> list[str]:
    """What is wrong with a command's output on a terminal of this width.

    Args:
        text: the output.
        wide: the same on a terminal with room for everything: its numbers are the whole ones.
        width: columns there are.
    """
    lines, whole = text.splitlines(), {*_NUMBER.findall(wide)}
    return [
        *(f"too wide: {line}" for line in lines if cell_len(line) > width),
        *(f"cut: {line}" for line in lines if _CUT.search(line)),
        *(f"no such number: {line}" for line in lines if {*_NUMBER.findall(line)} - whole),
    ]
