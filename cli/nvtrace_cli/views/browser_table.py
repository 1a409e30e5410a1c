"""The step table of the browser: a step among its neighbours, one line each.

A narrow screen shows fewer columns. `notes.py` has the words of the last column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from nvtrace.summary import fold_alike
from nvtrace_cli.views.notes import notes
from nvtrace_cli.views.prose import NO_BREAK_SPACE
from nvtrace_cli.views.text import count, duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import JustifyMethod

    from nvtrace.catalog import Catalog
    from nvtrace.summary import AlikeSteps, StepSummary

# (name, columns it takes at least, columns that the screen must have): the widths do not jump from
# frame to frame.
_COLUMNS = (
    ("step", 5, 0),
    ("phase", 8, 0),
    ("seqs", 4, 44),
    ("tokens", 6, 100),
    ("waiting", 4, 60),
    ("running", 4, 60),
    ("free", 4, 52),
    ("time", 8, 92),
)


def near_table(
    steps: Sequence[StepSummary],
    here: int,
    last: int,
    catalog: Catalog,
    pointer: str,
    *,
    width: int,
    num_rows: int,
) -> Table:
    """The steps around one, as a table without a title.

    Args:
        steps: the step and its neighbours, in their order.
        here: the number of the step in the middle.
        last: the largest number of a step.
        catalog: the words.
        pointer: marks the step.
        width: of the table.
        num_rows: steps to show.
    """
    columns = [column for column in _COLUMNS if width >= column[2]]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="label", expand=True)
    table.add_column(width=len(pointer), no_wrap=True)
    for name, least, _ in columns:
        least_width = max(least, len(count(last))) if name == "step" else least
        justify: JustifyMethod = "left" if name == "phase" else "right"
        heading = Text(catalog.ui(f"column_{name}"))
        table.add_column(heading, justify=justify, no_wrap=True, min_width=least_width)
    heading = Text(catalog.ui("column_event"))
    table.add_column(heading, ratio=1, no_wrap=True, overflow="ellipsis")
    for row in _window(steps, here, num_rows):
        is_here = row.first.index == here
        cells = _cells(row.first)
        table.add_row(
            Text(pointer if is_here else "", style="heading"),
            *(cells[name] for name, _, _ in columns),
            _what_happened(row, catalog),
            style="bold" if is_here else "",
        )
    return table


def _window(steps: Sequence[StepSummary], here: int, num_rows: int) -> list[AlikeSteps]:
    """So many rows, with the step in the middle unless it is near an end."""
    rows = fold_alike(steps, is_unfolded=True)
    middle = next(place for place, row in enumerate(rows) if row.first.index == here)
    start = max(min(middle - num_rows // 2, len(rows) - num_rows), 0)
    return rows[start : start + num_rows]


def _cells(step: StepSummary) -> dict[str, Text]:
    return {
        "step": Text(count(step.index)),
        "phase": Text(step.phase or "-", style=step.phase or "quiet"),
        "seqs": Text(count(len(step.shares))),
        "tokens": Text(count(step.num_batched_tokens)),
        "waiting": Text(count(step.waiting_len), style="waiting" if step.waiting_len else "quiet"),
        "running": Text(count(step.running_len)),
        "free": Text(count(step.free_blocks)),
        "time": Text("-" if step.wall_ns is None else duration(step.wall_ns), style="quiet"),
    }


def _what_happened(row: AlikeSteps, catalog: Catalog) -> Text:
    """All notes on one line."""
    line = Text(no_wrap=True, overflow="ellipsis")
    for note in notes(row, catalog):
        if line:
            line.append(catalog.ui("note_separator"), style="quiet")
        line.append(note.text.replace(NO_BREAK_SPACE, " "), style=note.style)
    return line
