"""nvtrace replay: a trace as a header, a timeline, a step table, totals; or as a log.

The views are in `views/`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from nvtrace_cli.failures import UsageError
from nvtrace_cli.options import LangOption, complete_events, selection, warn, words


class View(StrEnum):
    """The part of a trace to show."""

    ALL = "all"
    TIMELINE = "timeline"
    STEPS = "steps"
    LOG = "log"


def replay(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="The trace; .gz and .zst are read too, - is stdin."),
    ],
    *,
    view: Annotated[
        View | None, typer.Option(help="What to show; by default all but the log.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="A..B", help="Only these steps: 17, 100..150, 100.., ..9.")
    ] = None,
    seq: Annotated[
        list[int] | None, typer.Option(metavar="ID", help="Only this request (may be repeated).")
    ] = None,
    event: Annotated[
        str | None,
        typer.Option(
            metavar="GLOB",
            help="Only these events: 'SCHEDULE_*', preempt ...",
            autocompletion=complete_events,
        ),
    ] = None,
    unfold: Annotated[
        bool, typer.Option("--unfold", help="Show every step in its own row.")
    ] = False,
    speed: Annotated[
        str | None,
        typer.Option(metavar="1x|10x|max", help="Play the steps in real time (on a terminal)."),
    ] = None,
    interactive: Annotated[
        bool,
        typer.Option(
            "--interactive", "-i", help="Browse it with keys, step by step (? lists the keys)."
        ),
    ] = False,
    lang: LangOption = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object per step (or per event of the log).")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="The step table with tabs, no colours.")
    ] = False,
) -> None:
    """Show a recorded run: timeline, steps, totals, or its log; or browse it with keys.

    Data goes to stdout, messages to stderr. Exit codes: 0 shown, 2 wrong usage, 3 not a readable
    trace, 4 a trace newer than this nvtrace.
    """
    if interactive:
        options: dict[str, object] = {
            "--json": json,
            "--plain": plain,
            "--view": view,
            "--seq": seq,
        }
        options |= {"--event": event, "--unfold": unfold, "--speed": speed}
        _refuse(options)
        from nvtrace_cli.browse import browse  # noqa: PLC0415 - needs a POSIX terminal

        browse(file, words(lang), selection(steps).first_step)
        return
    from nvtrace_cli.views.replay import Replay, parse_speed  # noqa: PLC0415 - nor rich

    if view is None:
        view = View.LOG if event is not None else View.ALL
    if json and plain:
        raise UsageError("--json and --plain cannot be used together: give one of them")
    if plain and view is View.TIMELINE:
        raise UsageError("--plain has no timeline: remove --view, or use --json")
    if event is not None and view in {View.ALL, View.TIMELINE}:
        raise UsageError(
            f"--event selects log lines or steps: use it with --view log or steps, not {view}"
        )
    screen = Replay(
        file,
        selection(steps, seq, event),
        words(lang),
        warn=warn,
        speed=None if speed is None else parse_speed(speed),
        is_unfolded=unfold,
    )
    if view is View.LOG:
        screen.show_log(as_json=json)
    elif json:
        screen.show_json()
    elif plain:
        screen.show_plain()
    else:
        screen.show(
            has_frame=view is View.ALL,
            has_timeline=view in {View.ALL, View.TIMELINE},
            has_steps=view in {View.ALL, View.STEPS},
        )


def _refuse(options: dict[str, object]) -> None:
    """Refuse options that make no sense with --interactive."""
    given = [name for name, value in options.items() if value]
    if given:
        raise UsageError(f"--interactive shows the whole trace on a terminal: remove {given[0]}")
