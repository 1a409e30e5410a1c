"""A benchmark's report on the terminal.

For each workload on each model: useful tokens per second of each contender, and where the time of
the engine's steps went. `nvtrace.bench` measures.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.text import Text

from nvtrace.bench.report import encode
from nvtrace.catalog import load_catalog
from nvtrace_cli.views.console import glyphs, make_console
from nvtrace_cli.views.prose import Prose
from nvtrace_cli.views.table import FittingTable
from nvtrace_cli.views.text import count, escape, flow, parameters, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console

    from nvtrace.bench.report import ContenderFacts, MachineFacts, Report, Result, Spread, StepClass

_CONTENDER_COLUMNS = ("contender", "tokens/s", "lowest", "highest", "cores", "engine is")
_STEP_COLUMNS = ("steps", "batch", "count", "untraced", "traced", "floor", "x floor")
_SHARE_COLUMNS = ("schedule", "prepare", "model", "sample", "after", "rest")
_LEAVING = (  # least important first
    *("cores", "highest", "lowest", "x floor", "count", "floor", "untraced"),
    *("after", "rest", "prepare", "sample", "schedule"),
)
_NOTHING = "-"


def print_json(report: Report) -> None:
    """The report, on stdout."""
    sys.stdout.write(encode(report).decode())


def print_plain(report: Report) -> None:
    """Two tables with tabs: contenders, then step classes (times in ms, shares of 1)."""
    contenders = [
        (result.model.name, result.workload.name, *cells)
        for result in report.results
        for cells in _plain_contenders(result)
    ]
    steps = [
        (result.model.name, result.workload.name, *_plain_step(step))
        for result in report.results
        for step in result.step_classes
    ]
    names = ("model", "workload")
    columns = (
        *names,
        "contender",
        "tokens_per_second",
        "lowest",
        "highest",
        "cores",
        "engine_times",
    )
    _print_tabbed(columns, contenders)
    sys.stdout.write("\n")
    _print_tabbed((*names, *_plain_step_columns()), steps)


def show(report: Report) -> None:
    """The report as tables."""
    console = make_console()
    for line in _machine(report.machine, glyphs(console).dot, console.width):
        console.print(Prose((line, "quiet")))
    for result in report.results:
        console.print()
        _show_result(result, console)


def _machine(machine: MachineFacts, dot: str, width: int) -> Iterator[str]:
    parts = [
        machine.processor,
        f"{machine.num_cpus} CPUs, {machine.num_threads} threads",
        *([machine.device] if machine.device != "cpu" else []),
        machine.platform,
        *(f"{name} {number}" for name, number in machine.versions.items()),
        f"commit {machine.commit or 'unknown'}",
    ]
    if machine.bytes_per_second is not None:
        parts.append(f"copies {machine.bytes_per_second / 1e9:.1f} GB/s")
    if machine.load_average is not None:
        parts.append(f"load {machine.load_average:.1f} before it began")
    yield from flow([escape(part) for part in parts], dot, width).split("\n")


def _show_result(result: Result, console: Console) -> None:
    model, work = result.model, result.workload
    console.print(Prose((f"{escape(model.name)}, {work.name}", "heading")))
    facts = [
        f"{parameters(model.num_parameters)} parameters in {model.dtype}",
        f"{count(work.num_requests)} requests",
        f"{count(work.num_prompt_tokens)} tokens in",
        f"{count(work.num_output_tokens)} out",
        f"weights {size(model.weight_bytes)}",
        f"KV {size(model.kv_bytes_per_token)} a token",
    ]
    for line in flow(facts, glyphs(console).dot, console.width).split("\n"):
        console.print(Prose((line, "quiet")))
    console.print()
    console.print(_contender_table(result, glyphs(console).times))
    console.print()
    console.print(_sameness(result))
    if result.step_classes:
        console.print()
        console.print(_step_table(result.step_classes))
        console.print()
        console.print(_share_table(result.step_classes))


def _contender_table(result: Result, times: str) -> FittingTable:
    table = _table(_CONTENDER_COLUMNS)
    for contender, ratio in _with_ratios(result):
        rate = contender.tokens_per_second
        faster = _NOTHING if ratio is None else f"{ratio.median:.2f}{times}"
        table.add_row(
            Text(contender.name),
            *map(_number, (rate.median, rate.low, rate.high)),
            Text(f"{contender.cores.median:.1f}"),
            Text(faster),
        )
    return table


def _sameness(result: Result) -> Prose:
    difference = result.first_difference
    if result.same_tokens is None:
        return Prose((f"Tokens were not compared: {result.not_compared}.", "quiet"))
    if difference is None:
        return Prose(("All generated the same tokens in every round.", "quiet"))
    sentence = (
        f"Not the same tokens: request {difference.request}, token {difference.position} of "
        f"{difference.contender} is {difference.token_id}, and {difference.against} has "
        f"{difference.expected}."
    )
    return Prose((sentence, "error"))


def _step_table(steps: Iterable[StepClass]) -> FittingTable:
    """How long a step takes, and how much longer than reading its bytes would."""
    table = _table(_STEP_COLUMNS)
    for step in steps:
        times = (step.untraced_ms, step.traced_ms, step.floor_ms)
        overs = (step.untraced_times_floor, step.traced_times_floor)
        table.add_row(
            Text(step.phase, style=step.phase),
            Text(_batch(step)),
            Text(count(step.num_steps)),
            *(Text(_NOTHING if ms is None else f"{ms:.2f} ms") for ms in times),
            Text(", ".join(f"{over:.1f}" for over in overs if over is not None) or _NOTHING),
        )
    return table


def _share_table(steps: Iterable[StepClass]) -> FittingTable:
    """Where the time of a traced step goes."""
    table = _table(("steps", "batch", *_SHARE_COLUMNS))
    for step in steps:
        table.add_row(
            Text(step.phase, style=step.phase),
            Text(_batch(step)),
            *(Text(f"{share:.1%}") for share in _share_values(step)),
        )
    return table


def _with_ratios(result: Result) -> Iterator[tuple[ContenderFacts, Spread | None]]:
    """Each contender, and how many times as fast the first one is; None for that one itself."""
    ratios = {ratio.against: ratio.times for ratio in result.ratios}
    for contender in result.contenders:
        yield contender, ratios.get(contender.name)


def _batch(step: StepClass) -> str:
    low, high = step.smallest_batch, step.largest_batch
    return str(low) if low == high else f"{low}-{high}"


def _share_values(step: StepClass) -> tuple[float, ...]:
    shares = step.shares
    return (
        shares.schedule,
        shares.prepare,
        shares.model,
        shares.sample,
        shares.postprocess,
        shares.rest,
    )


def _number(value: float) -> Text:
    return Text(f"{value:.1f}" if value < 1000 else count(round(value)))  # noqa: PLR2004 - four digits


def _table(columns: Sequence[str]) -> FittingTable:
    """A table whose first column is text and whose others are numbers."""
    return FittingTable(
        dict(zip(columns, columns, strict=True)),
        load_catalog("en"),
        leaving=[column for column in _LEAVING if column in columns],
        words=columns[:1],
    )


# -- plain -----------------------------------------------------------------------------------------


def _plain_contenders(result: Result) -> Iterator[tuple[str, ...]]:
    for contender, ratio in _with_ratios(result):
        rate = contender.tokens_per_second
        times = None if ratio is None else ratio.median
        numbers = (rate.median, rate.low, rate.high, contender.cores.median, times)
        yield contender.name, *map(_plain_number, numbers)


def _plain_step_columns() -> tuple[str, ...]:
    times = ("untraced_ms", "traced_ms", "gpu_ms", "floor_ms")
    shares = ("schedule", "prepare", "model", "sample", "postprocess", "rest")
    return ("phase", "smallest_batch", "largest_batch", "num_steps", *times, *shares)


def _plain_step(step: StepClass) -> tuple[str, ...]:
    times = (step.untraced_ms, step.traced_ms, step.gpu_ms, step.floor_ms)
    return (
        step.phase,
        *map(str, (step.smallest_batch, step.largest_batch, step.num_steps)),
        *map(_plain_number, (*times, *_share_values(step))),
    )


def _plain_number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.4f}"


def _print_tabbed(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for row in (columns, *rows):
        sys.stdout.write("\t".join(escape(cell) for cell in row) + "\n")
