"""nvtrace tail: follow a run that is still being written, from another terminal.

`views/tail.py` draws the lines.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from nvtrace_cli.failures import UsageError
from nvtrace_cli.options import LangOption, complete_events, say, selection, warn, words

_SECONDS_BETWEEN_LOOKS = 0.1


def tail(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="The trace, even before it exists; .gz and .zst too."),
    ],
    *,
    event: Annotated[
        str | None,
        typer.Option(
            metavar="GLOB",
            help="Only these events: 'SCHEDULE_*', preempt ..",
            autocompletion=complete_events,
        ),
    ] = None,
    seq: Annotated[
        list[int] | None, typer.Option(metavar="ID", help="Only this request (may be repeated).")
    ] = None,
    lang: LangOption = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per event.")] = False,
) -> None:
    """Follow the log of a run while it goes on, until it ends.

    Ctrl-C stops this command, not the run. Exit codes: 0 the run has ended, 2 wrong usage, 3 not a
    readable trace, 4 a trace newer than this nvtrace, 130 stopped.
    """
    from nvtrace.follow import follow_trace  # noqa: PLC0415 - --help needs no msgspec
    from nvtrace_cli.views.tail import Log  # noqa: PLC0415 - nor rich

    if file == "-":
        raise UsageError("tail follows a file; `nvtrace replay - --view log` reads standard input")
    catalog = words(lang)
    log = Log(selection(seq_ids=seq, event_glob=event), catalog, as_json=json)

    def pause() -> None:
        log.flush()
        time.sleep(_SECONDS_BETWEEN_LOOKS)

    for record in follow_trace(
        Path(file),
        pause=pause,
        missing=lambda: say(catalog.ui("tail_waiting", file=file)),
        warn=warn,
    ):
        log.show(record)
