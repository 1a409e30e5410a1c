"""nvtrace at: the engine's whole state at one moment of a trace, and conditional breakpoints.

`nvtrace.snapshots` finds the state, `views/at.py` draws it.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nvtrace_cli.failures import UsageError, tidy_ends
from nvtrace_cli.options import LangOption, say, warn, words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvtrace.at import Moment, Point
    from nvtrace.snapshots import SeekableTrace

_NOT_FOUND = 1


class MomentChoice(StrEnum):
    """The two moments of a step."""

    SCHEDULE = "schedule"
    END = "end"


def at(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="The trace; .gz and .zst are read too, - is stdin."),
    ],
    step: Annotated[
        int | None,
        typer.Argument(
            metavar="[STEP]",
            min=1,
            help="The engine_step. By default the last one; with --until, all steps are searched.",
            show_default=False,
        ),
    ] = None,
    *,
    moment: Annotated[
        MomentChoice | None,
        typer.Option(help="After the step's schedule, or at its end (the default)."),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="CONDITION",
            help="Go on from STEP to where this is true: 'free_blocks < 10', 'event == PREEMPT', "
            "'3 in waiting and not kv_usage < 0.5'.",
        ),
    ] = None,
    backwards: Annotated[
        bool, typer.Option("--backwards", help="Search from STEP (or the end) to the start.")
    ] = False,
    lang: LangOption = None,
    json: Annotated[bool, typer.Option("--json", help="The state as one JSON object.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Tables with tabs, no colours.")] = False,
) -> None:
    """Show the engine's state at one moment: queues, requests, KV blocks, the step's inputs.

    On a large trace the first call writes FILE.nvindex beside it, so that the next calls are fast.
    Data goes to stdout, messages to stderr. Exit codes: 0 shown, 1 the condition is true nowhere, 2
    wrong usage, 3 not a readable trace, 4 a trace newer than this nvtrace.
    """
    if json and plain:
        raise UsageError("--json and --plain cannot be used together: give one of them")
    if backwards and until is None:
        raise UsageError("--backwards needs --until CONDITION")
    from nvtrace_cli.views import at as view  # noqa: PLC0415 - --help needs no rich

    with tidy_ends(), _opened(file) as trace:
        found = _look(trace, step, moment, until, is_backwards=backwards)
        if found.schedule is None:
            _say_whose(trace, file)
        if json:
            view.print_json(found)
        elif plain:
            view.print_plain(found)
        else:
            view.show(found, trace.name, words(lang))


def _look(
    trace: SeekableTrace,
    step: int | None,
    moment: MomentChoice | None,
    until: str | None,
    *,
    is_backwards: bool,
) -> Moment:
    from nvtrace.query import QueryError, parse  # noqa: PLC0415 - --help needs no msgspec
    from nvtrace.snapshots import NoSuchStepError  # noqa: PLC0415 - the same

    point: Point | None = None
    if moment is not None:
        point = "schedule" if moment is MomentChoice.SCHEDULE else "end"
    try:
        if until is None:
            return trace.at(step, point or "end")
        place = trace.find(parse(until), step=step, point=point, is_backwards=is_backwards)
        if place is not None:
            return trace.at(place.step, place.point)
    except QueryError as error:
        raise UsageError(f"--until {error}") from error
    except NoSuchStepError as error:
        raise UsageError(str(error)) from error
    where = "" if step is None else f" {'up to' if is_backwards else 'from'} step {step}"
    say(f"{until} is true nowhere in {trace.name}{where}")
    raise typer.Exit(_NOT_FOUND)


def _say_whose(trace: SeekableTrace, file: str) -> None:
    """If the trace has no decisions because its rank does not schedule, warn."""
    from nvtrace.caveats import about_rank  # noqa: PLC0415 - --help needs no msgspec

    rank = trace.header.rank
    if rank:
        warn(about_rank(file, rank))


@contextmanager
def _opened(file: str) -> Iterator[SeekableTrace]:
    """The trace, opened for random access. A pipe is copied to a temporary file."""
    from nvtrace.reader import UnreadableTraceError, name_of, open_trace  # noqa: PLC0415 - --help needs no msgspec
    from nvtrace.snapshots import SeekableTrace  # noqa: PLC0415 - the same
    from nvtrace_cli.views.reading import reading_bar  # noqa: PLC0415 - nor rich

    if Path(file).is_file():
        with reading_bar(file) as watch:
            trace = SeekableTrace(Path(file), warn=warn, watch=watch)
        if trace.has_made_index:
            say(f"{trace.index_path} was made, so that the next calls on {file} are fast")
        yield trace
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        try:
            with open_trace(file) as source, path.open("wb") as copy:
                shutil.copyfileobj(source, copy)
        except OSError as error:
            raise UnreadableTraceError(
                f"{name_of(file)} cannot be copied into {folder} ({error.strerror})"
            ) from error
        yield SeekableTrace(path, warn=warn, name=str(name_of(file)))
