"""nvtrace diff: two traces, and the first decision that differs.

`nvtrace.diff` compares, `views/diff.py` draws the differences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nvtrace_cli.failures import UsageError
from nvtrace_cli.options import LangOption, warn, words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvtrace.envelope import Record

_DIFFER = 1


def diff(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A trace; .gz and .zst are read too, - is stdin.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Another trace.")],
    *,
    limit: Annotated[
        int, typer.Option(min=0, metavar="N", help="Most rows in a table of requests.")
    ] = 20,
    lang: LangOption = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object per difference, a summary last.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="One difference a line, with tabs, no colours.")
    ] = False,
) -> None:
    """Compare two traces: settings, inputs, the first reason and effect that differ, times, tokens.

    The effects of a decision are who is scheduled, preempted and admitted, and with which blocks;
    its reason is the code that says why. Inputs (prompts, parameters, seeds) and times are
    reported too, but do not change the exit code. Data goes to stdout, messages to stderr. Exit
    codes: 0 the same decisions, 1 they differ, 2 wrong usage, or the trace of a rank that decides
    nothing, 3 not a readable trace, 4 a trace newer than this nvtrace.
    """
    from nvtrace.diff import diff as compare  # noqa: PLC0415 - --help needs no msgspec
    from nvtrace_cli.views import diff as view  # noqa: PLC0415 - nor rich

    if json and plain:
        raise UsageError("--json and --plain cannot be used together: give one of them")
    if a == b == "-":
        raise UsageError("standard input can be only one of the traces: give a file for the other")
    difference = compare(_records(a), _records(b))
    if json:
        view.print_json(difference)
    elif plain:
        view.print_plain(difference)
    else:
        view.show(difference, words(lang), limit)
    if not difference.is_same:
        raise typer.Exit(_DIFFER)


def _records(file: str) -> Iterator[Record]:
    from nvtrace.caveats import saying_whose  # noqa: PLC0415 - --help needs no msgspec
    from nvtrace.reader import read_trace  # noqa: PLC0415 - the same

    return saying_whose(read_trace(file, warn=warn), file, _refuse)


def _refuse(whose: str) -> None:
    """Refuse a trace without decisions: there is nothing to compare."""
    raise UsageError(whose)
