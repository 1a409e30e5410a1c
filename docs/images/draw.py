"""Draw the pictures of this folder: what commands print of docs/traces, as a terminal shows it.

    python docs/images/draw.py [FOLDER]

Knows how to run a command and to turn its colours into a picture. Nothing in a picture is written
by hand.
"""

from __future__ import annotations

import html
import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

WIDTH = 84
CELL = 12.2  # the width of a terminal's cell in rich's pictures
HERE = Path(__file__).parent
TRACES = HERE.parent / "traces"
PICTURES = {  # a picture's name (`.zh`: in Chinese) -> its command
    "replay": "replay example.jsonl.zst",
    "timeline": "replay example.jsonl.zst --view timeline",
    "timeline.zh": "replay example.jsonl.zst --view timeline",
    "preemption": "replay preemption.jsonl.zst --view timeline",
    "preemption.zh": "replay preemption.jsonl.zst --view timeline",
}


def draw(command: str, language: str) -> str:
    """The picture of what a command prints in a language."""
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "LC_ALL": "C.UTF-8"}
    shown = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", "nvtrace_cli", *command.split(), "--lang", language],
        check=True,
        capture_output=True,
        encoding="utf-8",
        env=environment,
        cwd=TRACES,
    ).stdout
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(shown.rstrip()))
    picture = console.export_svg(title=f"nvtrace {command}")
    # The reader's own monospaced font: a picture should fetch nothing.
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    return re.sub(r'textLength="[\d.]+"([^>]*)>([^<]*)', _widen, picture)


def _widen(text: re.Match[str]) -> str:
    """Give Chinese two cells a letter, as terminals do; rich gives it one."""
    width = CELL * cell_len(html.unescape(text[2]))
    return f'textLength="{width:.1f}"{text[1]}>{text[2]}'


def main() -> None:
    """Draw them all, here or in the folder that the command line names."""
    folder = Path(sys.argv[1]) if sys.argv[1:] else HERE
    for name, command in PICTURES.items():
        picture = draw(command, "zh" if name.endswith(".zh") else "en")
        (folder / f"{name}.svg").write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
