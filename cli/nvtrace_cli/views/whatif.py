"""Runs side by side: the recorded one, the unchanged re-run, and a re-run for each case.

Simulated times are marked as such. `nvtrace.whatif` runs the cases.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from rich.text import Text

from nvtrace.whatif import RunRow, recorded_row, simulated_row
from nvtrace_cli.views.console import make_console
from nvtrace_cli.views.machine import json_line
from nvtrace_cli.views.notes import why_refused
from nvtrace_cli.views.prose import Prose
from nvtrace_cli.views.table import FittingTable
from nvtrace_cli.views.text import count, duration, escape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvtrace.catalog import Catalog
    from nvtrace.steptime import OutOfRange, Phase, PhaseFit
    from nvtrace.whatif import Recording, RerunResult

_NOTHING = "-"
_DECISIONS = ("run", "steps", "prefill", "decode", "mixed", "preemptions", "hits", "batch")
_TIMES = ("run", "times", "duration", "p50", "p95", "rate")
_LEAVING = ("mixed", "hits", "prefill", "batch", "times", "p95", "decode", "p50")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is shown.

    Attributes:
        recording: the recorded run.
        outcomes: the unchanged re-run (None if it cannot be run), then one for each case.
        cases: each case's settings, as the user wrote them.
        is_by_step: requests arrived before the step of the same number.
    """

    recording: Recording
    outcomes: list[RerunResult | None]
    cases: list[str]
    is_by_step: bool

    def rows(self) -> list[RunRow]:
        """The recorded run, then the re-runs."""
        rows = [recorded_row(self.recording)]
        for name, outcome in zip(["unchanged", *self.cases], self.outcomes, strict=True):
            known = None if outcome is None else simulated_row(name, outcome)
            rows.append(known or RunRow(name, "simulated"))
        return rows

    @property
    def first_other_step(self) -> int | None:
        """The first step at which the unchanged re-run differs from the recorded run."""
        unchanged = self.outcomes[0]
        return None if unchanged is None else unchanged.first_other_step(self.recording)

    @property
    def fits(self) -> dict[Phase, PhaseFit]:
        """The fitted step times, by phase."""
        return self.recording.step_times().fits


def print_json(comparison: Comparison) -> None:
    """One object a line: {"kind": "fit"} for each phase, {"kind": "run"} for each row.

    Times are in nanoseconds; those of a run whose `mode` is "simulated" are simulated.
    """
    for phase, fit in comparison.fits.items():
        _print_line(json_line({"kind": "fit", "phase": phase} | asdict(fit)))
    for index, row in enumerate(comparison.rows()):
        extra: dict[str, Any] = {}
        if index == 1 and comparison.is_by_step and comparison.outcomes[0] is not None:
            extra = {"first_other_step": comparison.first_other_step}
        _print_line(json_line({"kind": "run"} | asdict(row) | extra))


def print_plain(comparison: Comparison) -> None:
    """The rows as a table with tabs, an empty line, and the fits. Unknown values are empty."""
    names = [field.name for field in fields(RunRow) if field.name not in {"beyond", "refusals"}]
    _print_line("\t".join(names))
    for row in comparison.rows():
        _print_line("\t".join(_plain(getattr(row, name)) for name in names))
    _print_line("")
    _print_line("phase\tnum_steps\tr_squared\tmedian_error")
    for phase, fit in comparison.fits.items():
        cells = (phase, fit.num_steps, fit.r_squared, fit.median_error)
        _print_line("\t".join(map(_plain, cells)))


def _plain(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else escape(str(value))


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")


# -- for people ------------------------------------------------------------------------------------


def show(comparison: Comparison, catalog: Catalog) -> None:
    """The cases, the table, and how far its simulated numbers can be trusted."""
    console = make_console()
    for number, case in enumerate(comparison.cases, start=1):
        name = catalog.ui("whatif_case", number=number)
        console.print(Text.assemble((f"{name}  ", "label"), escape(case)))
    if comparison.cases:
        console.print()
    rows = comparison.rows()
    console.print(_decision_table(rows, catalog))
    console.print()
    console.print(_time_table(rows, catalog))
    console.print()
    if comparison.is_by_step or comparison.outcomes[0] is None:
        console.print(Prose(_of_the_unchanged(comparison, catalog)))
    for index, row in enumerate(rows):
        for sentence in _of_row(row, _name(index, catalog), catalog):
            console.print(Prose((sentence, "warning")))
    for sentence in _of_fits(comparison, catalog):
        console.print(Prose((sentence, "quiet")))


def _decision_table(rows: list[RunRow], catalog: Catalog) -> FittingTable:
    table = _table(_DECISIONS, catalog)
    for index, row in enumerate(rows):
        table.add_row(
            _name(index, catalog),
            _number(row.num_steps),
            _number(row.num_prefill_steps),
            _number(row.num_decode_steps),
            _number(row.num_mixed_steps),
            _number(row.num_preemptions),
            _number(row.prefix_cache_hits),
            _NOTHING if row.mean_batch is None else f"{row.mean_batch:.1f}",
        )
    return table


def _time_table(rows: list[RunRow], catalog: Catalog) -> FittingTable:
    table = _table(_TIMES, catalog)
    for index, row in enumerate(rows):
        table.add_row(
            _name(index, catalog),
            Text(catalog.ui(f"whatif_{row.mode}"), "quiet" if row.mode == "simulated" else ""),
            _time(row.duration_ns),
            _time(row.ttft_p50_ns),
            _time(row.ttft_p95_ns),
            _rate(row.output_throughput),
        )
    return table


def _table(columns: tuple[str, ...], catalog: Catalog) -> FittingTable:
    headings = {column: catalog.ui(f"whatif_column_{column}") for column in columns}
    leaving = [column for column in _LEAVING if column in columns]
    return FittingTable(headings, catalog, leaving=leaving, words=columns[:1])


def _name(index: int, catalog: Catalog) -> str:
    if index > 1:
        return catalog.ui("whatif_case", number=index - 1)
    return catalog.ui("whatif_unchanged" if index else "whatif_recorded")


def _of_the_unchanged(comparison: Comparison, catalog: Catalog) -> tuple[str, str]:
    if comparison.outcomes[0] is None:
        policy = escape(comparison.recording.settings.policy)
        return catalog.ui("whatif_not_again", policy=policy), "warning"
    step = comparison.first_other_step
    if step is not None:
        return catalog.ui("whatif_other", step=step), "error"
    return catalog.ui("whatif_same", count=count(len(comparison.recording.schedule))), ""


def _of_row(row: RunRow, name: str, catalog: Catalog) -> Iterator[str]:
    if row.beyond:
        key = "whatif_stopped" if row.num_steps is None else "whatif_untimed"
        why = catalog.ui("note_separator").join(_why(beyond, catalog) for beyond in row.beyond)
        yield catalog.ui(key, run=name, count=count(row.num_untimed), why=why)
    if row.num_refused:
        why = why_refused(row.refusals, catalog)
        yield catalog.ui("whatif_refused", run=name, count=count(row.num_refused), why=why)
    if row.num_left_out:
        yield catalog.ui("whatif_left_out", run=name, count=count(row.num_left_out))


def _why(beyond: OutOfRange, catalog: Catalog) -> str:
    if beyond.quantity is None:
        return catalog.ui("whatif_never", phase=beyond.phase)
    return catalog.ui(
        "whatif_beyond",
        phase=beyond.phase,
        value=count(beyond.value),
        what=catalog.ui(f"whatif_of_{beyond.quantity}"),
        low=count(beyond.low),
        high=count(beyond.high),
    )


def _of_fits(comparison: Comparison, catalog: Catalog) -> Iterator[str]:
    yield catalog.ui("whatif_fits")
    for phase, fit in comparison.fits.items():
        steps = count(fit.num_steps)
        if fit.median_error is None:
            yield catalog.ui("whatif_fit_mean", phase=phase, steps=steps)
        else:
            r_squared = _NOTHING if fit.r_squared is None else f"{fit.r_squared:.2f}"
            error = f"{fit.median_error:.1%}"
            yield catalog.ui(
                "whatif_fit", phase=phase, steps=steps, error=error, r_squared=r_squared
            )


def _number(number: int | None) -> str:
    return _NOTHING if number is None else count(number)


def _time(nanoseconds: float | None) -> Text:
    if nanoseconds is None:
        return Text(_NOTHING, style="quiet")
    return Text(duration(nanoseconds).replace(" ", ""))


def _rate(per_second: float | None) -> str:
    if per_second is None:
        return _NOTHING
    return f"{per_second:.1f}" if per_second < 1000 else count(round(per_second))  # noqa: PLR2004 - four digits
