"""nvtrace doctor: what this machine can run, and what a trace costs here.

`nvtrace.doctor` examines the machine, `views/doctor.py` draws the answer.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from nvtrace_cli.options import LangOption, words


def doctor(
    *,
    cost: Annotated[
        bool,
        typer.Option("--cost/--no-cost", help="Measure what tracing costs (takes some seconds)."),
    ] = True,
    lang: LangOption = None,
    json: Annotated[bool, typer.Option("--json", help="All of it as one JSON object.")] = False,
) -> None:
    """Show what this machine can run, what "auto" means on it, and what tracing costs."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded; see `run`
    from nvtrace.doctor import examine_machine, measure_tracing  # noqa: PLC0415 - loads torch
    from nvtrace_cli.views import doctor as view  # noqa: PLC0415 - --help needs no rich

    machine = examine_machine()
    tracing = measure_tracing() if cost else None
    if json:
        view.print_json(machine, tracing)
    else:
        view.print_report(machine, tracing, words(lang))
