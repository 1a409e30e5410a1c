"""The step table: what the scheduler decided, step by step, equal steps folded.

`nvtrace.summary` groups steps into rows, `notes.py` has the words of the last column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from nvtrace_cli.views.notes import notes
from nvtrace_cli.views.prose import NO_BREAK_SPACE, Prose
from nvtrace_cli.views.table import FittingTable
from nvtrace_cli.views.text import duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

    from nvtrace.catalog import Catalog
    from nvtrace.summary import AlikeSteps

_COLUMNS = (*("step", "phase", "seqs", "tokens"), *("waiting", "running", "free", "time", "event"))
PLAIN_COLUMNS = (
    *("first_step", "last_step", "phase", "scheduled", "tokens"),
    *("waiting", "running", "free_blocks", "wall_ms", "key_event"),
)


def step_table(rows: Iterable[AlikeSteps], catalog: Catalog) -> FittingTable:
    """Rows as a table for 80 columns; a narrower one has fewer columns.

    Args:
        rows: from `nvtrace.summary.fold_alike`.
        catalog: the words.
    """
    headings = {name: catalog.ui(f"column_{name}") for name in _COLUMNS}
    headings["time"] += " "  # space before the words
    table = FittingTable(
        headings,
        catalog,
        leaving=("tokens", "running", "seqs", "free", "waiting", "time", "phase"),
        words=("phase",),
        prose="event",
        gap=0,
        title=catalog.ui("steps_title"),
        caption=catalog.ui("steps_key"),
    )
    for row in rows:
        table.add_row(*_cells(row, catalog))
    return table


def _cells(row: AlikeSteps, catalog: Catalog) -> Iterator[RenderableType]:
    step = row.first
    yield Text(_step_range(row))
    yield Text(step.phase or "-", style=step.phase or "quiet")
    yield Text(str(step.scheduled))
    yield Text(str(step.num_batched_tokens))
    queues = (step.waiting_len, step.running_len, row.last.free_blocks)
    waiting, running, free = ("-",) * 3 if step.is_led else map(str, queues)
    yield Text(waiting, style="waiting" if step.waiting_len else "quiet")
    yield Text(running)
    yield Text(free)
    yield Text(f"{_time(row)} ", style="quiet" if row.is_folded else "")
    yield Prose(*((note.text, note.style) for note in notes(row, catalog)))


def _step_range(row: AlikeSteps) -> str:
    first, last = row.first.index, row.last.index
    return f"{first} - {last}" if row.is_folded else str(first)


def _time(row: AlikeSteps) -> str:
    if row.wall_ns is None:
        return "-"
    return f"{'~' if row.is_folded else ''}{duration(row.wall_ns)}"


def plain_lines(rows: Iterable[AlikeSteps], catalog: Catalog) -> Iterator[str]:
    """The same table with tabs between its columns, for other programs."""
    yield "\t".join(PLAIN_COLUMNS)
    for row in rows:
        step = row.first
        queues = (step.waiting_len, step.running_len, row.last.free_blocks)
        sentences = (note.text.replace(NO_BREAK_SPACE, " ") for note in notes(row, catalog))
        yield "\t".join(
            (
                str(step.index),
                str(row.last.index),
                step.phase or "",
                str(step.scheduled),
                str(step.num_batched_tokens),
                *("" if step.is_led else str(number) for number in queues),
                "" if row.wall_ns is None else f"{row.wall_ns / 1e6:.3f}",
                catalog.ui("note_separator").join(sentences),
            )
        )
