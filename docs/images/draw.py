"""Draw replay.svg: what `nvtrace replay` prints of the article's run, as a terminal shows it.

    python docs/images/draw.py TRACE

Knows how to run the command and to turn its colours into a picture. Nothing in the picture is
written by hand.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 84
PICTURE = Path(__file__).with_name("replay.svg")


def main() -> None:
    """Replay the trace that the command line names, and draw the output."""
    trace = Path(sys.argv[1])
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "LANG": "en_US.UTF-8"}
    shown = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", "nvtrace_cli", "replay", trace.name, "--lang", "en"],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        cwd=trace.parent,
    ).stdout
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(shown.rstrip()))
    picture = console.export_svg(title=f"nvtrace replay {trace.name}")
    # The reader's own monospaced font: a picture should fetch nothing.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL), "utf-8")


if __name__ == "__main__":
    main()
