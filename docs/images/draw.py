"""Draw the pictures of this folder: what commands print of docs/traces, as a terminal shows it.

    python docs/images/draw.py [FOLDER]

Knows how to run a command and to turn its colours into a picture. Nothing in a picture is written
by hand. `moving.svg` shows `nvtrace replay --speed`: its frames lie below one another, as on a
strip of film, and a window shows one after the other.
"""

from __future__ import annotations

import html
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import diagrams
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments
from rich.text import Text

from nvtrace.catalog import load_catalog
from nvtrace.reader import read_trace
from nvtrace.summarize import summarize
from nvtrace_cli.views.console import THEME
from nvtrace_cli.views.player import frame
from nvtrace_cli.views.timeline import Timeline

WIDTH = 84
CELL = 12.2  # the width of a terminal's cell in rich's pictures
HERE = Path(__file__).parent
TRACES = HERE.parent / "traces"
PICTURES = {  # a picture's name (`.zh`: in Chinese) -> its command
    "timeline": "replay example.jsonl.zst --view timeline",
    "timeline.zh": "replay example.jsonl.zst --view timeline",
    "preemption": "replay preemption.jsonl.zst --view timeline",
    "preemption.zh": "replay preemption.jsonl.zst --view timeline",
}
MOVING = "preemption.jsonl.zst"  # the trace of moving.svg
STEPS_PER_FRAME = 6
SECONDS_PER_FRAME = 0.3
HEIGHT = 22  # lines of a frame
LINE_HEIGHT = 24.4
# A template as rich takes it. Where nothing may move, the last frame is shown.
FILM = """<svg viewBox="0 0 {width} 596" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px monospace }}
{styles}
.film {{ transform: translateY(-END%px); animation: film DURATION%s infinite }}
@keyframes film {{
  0% {{ transform: translateY(0); animation-timing-function: steps(MOVES%, end) }}
  85%, 100% {{ transform: translateY(-END%px) }}
}}
@media (prefers-reduced-motion: reduce) {{ .film {{ animation: none }} }}
</style>
<rect fill="#292929" width="100%" height="100%" rx="8"/>
<text fill="#868887" x="21" y="34" style="font: 20px monospace">$ TITLE%</text>
<svg x="9" y="46" width="{terminal_width}" height="WINDOW%">
<g class="film"><g class="{unique_id}-matrix">
{matrix}
</g></g>
</svg>
</svg>
"""


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
    return _picture(console, command)


def _picture(console: Console, command: str) -> str:
    picture = console.export_svg(title=f"nvtrace {command}")
    # The reader's own monospaced font: a picture should fetch nothing.
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    return re.sub(r'textLength="[\d.]+"([^>]*)>([^<]*)', _widen, picture)


def _widen(text: re.Match[str]) -> str:
    """Give Chinese two cells a letter, as terminals do; rich gives it one."""
    width = CELL * cell_len(html.unescape(text[2]))
    return f'textLength="{width:.1f}"{text[1]}>{text[2]}'


def draw_moving() -> str:
    """A run step by step, as `--speed` plays it: a frame every few steps."""
    steps = summarize(read_trace(TRACES / MOVING)).steps
    console = Console(
        record=True,
        width=WIDTH,
        height=HEIGHT,
        file=io.StringIO(),
        force_terminal=True,
        highlight=False,
        theme=THEME,
    )
    catalog, last = load_catalog("en"), steps[-1].index
    seq_ids = sorted({seq_id for step in steps for seq_id in step.seq_ids})
    ends = [*range(1, len(steps), STEPS_PER_FRAME), len(steps)]
    for end in ends:
        timeline = Timeline(steps[:end], seq_ids, catalog, last)
        shown = frame(steps[:end], timeline, catalog, console, last)
        for line in console.render_lines(shown, console.options.update(height=HEIGHT)):
            console.print(Segments([*line, Segment.line()]), end="")
    num_moves = len(ends) - 1
    filled = {
        "TITLE": f"nvtrace replay {MOVING} --speed 10x",
        "END": f"{num_moves * HEIGHT * LINE_HEIGHT:g}",
        "MOVES": f"{num_moves}",
        "DURATION": f"{num_moves * SECONDS_PER_FRAME / 0.85:.1f}",
        "WINDOW": f"{HEIGHT * LINE_HEIGHT:g}",
    }
    template = FILM
    for name, value in filled.items():
        template = template.replace(f"{name}%", value)
    picture = console.export_svg(code_format=template)
    # Both only take room: nothing is wider than its line.
    return re.sub(r' clip-path="[^"]*"', "", picture).replace("&#160;", "\N{NO-BREAK SPACE}")


def main() -> None:
    """Draw them all, here or in the folder that the command line names."""
    folder = Path(sys.argv[1]) if sys.argv[1:] else HERE
    for name, command in PICTURES.items():
        picture = draw(command, "zh" if name.endswith(".zh") else "en")
        (folder / f"{name}.svg").write_text(picture, "utf-8")
    (folder / "moving.svg").write_text(draw_moving(), "utf-8")
    for name, figure in diagrams.FIGURES.items():
        (folder / f"{name}.svg").write_text(figure(zh=False).svg(), "utf-8")
        (folder / f"{name}.zh.svg").write_text(figure(zh=True).svg(), "utf-8")


if __name__ == "__main__":
    main()
