"""nvtrace validate: is a file a trace, line by line?

`nvtrace.validate` has the rules, `views/validate.py` draws the faults.
"""

from __future__ import annotations

from typing import Annotated

import typer

from nvtrace_cli.failures import UsageError
from nvtrace_cli.options import LangOption, warn, words

_FOUND = 1


def validate(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="The trace; .gz and .zst are read too, - is stdin."),
    ],
    *,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show every error, not only the first twenty.")
    ] = False,
    lang: LangOption = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per error.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="One error a line, with tabs, no colours.")
    ] = False,
) -> None:
    """Check every line of a trace against the schema and the rules of its envelope.

    `nvtrace check` tells whether the events are consistent. Exit codes: 0 every line is valid, 1
    some are not, 2 wrong usage, 3 there is no trace to read, 4 a trace newer than this nvtrace.
    """
    from nvtrace_cli.views import validate as view  # noqa: PLC0415 - --help needs no rich

    if json and plain:
        raise UsageError("--json and --plain cannot be used together: give one of them")
    faults = view.Faults(file, words(lang), warn=warn)
    if json:
        num_faults = faults.print_json()
    elif plain:
        num_faults = faults.print_plain()
    else:
        num_faults = faults.show(is_all=show_all)
    if num_faults:
        raise typer.Exit(_FOUND)
