"""CSV: one file per kind of event, FOLDER/STEP_END.csv, so that each has just its own columns.

A file with all events would have a hundred columns, nearly all empty in each row. The quoting is
RFC 4180's, in UTF-8; the first line names the columns. `rank` comes first. An empty cell is None,
true and false are the bools, lists are JSON. Numbers have all their digits.

Text is not changed. A spreadsheet takes a cell that begins with = for a formula: import the columns
of a trace that you do not trust as text.
"""

from __future__ import annotations

import csv
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from nvtrace.export import json_cell
from nvtrace.export.tables import TABLES, row_of, table_of
from nvtrace.files import atomic_writes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from nvtrace.envelope import Record


def write(records: Iterable[tuple[int, Record]], folder: Path) -> int:
    """Write the tables that have rows: all of them, or none.

    An older export in the folder is replaced: tables that have no rows now are removed, so that
    those of two runs never lie side by side.

    Args:
        records: what `read_ranks` yields.
        folder: made if it is not there.

    Returns:
        The number of rows.

    Raises:
        OSError: a file cannot be written.
    """
    num_rows = 0
    writers: dict[str, Any] = {}
    with atomic_writes() as draft_of, ExitStack() as files:
        for rank, record in records:
            name = table_of(record)
            if name not in writers:
                draft = draft_of(folder / f"{name}.csv")
                file = draft.open("w", encoding="utf-8", newline="")
                writers[name] = csv.writer(files.enter_context(file))
                names = [column.name for column in TABLES[name] if column.name != "rank"]
                writers[name].writerow(["rank", *names])
            columns = zip(TABLES[name], row_of(record), strict=True)
            cells = [_cell(value) for column, value in columns if column.name != "rank"]
            writers[name].writerow([rank, *cells])
            num_rows += 1
    for name in TABLES.keys() - writers.keys():
        older = folder / f"{name}.csv"
        if older.is_file():
            older.unlink()
    return num_rows


def _cell(value: object) -> object:
    match value:
        case bool():
            return "true" if value else "false"
        case list() | tuple() | dict():
            return json_cell(value)
        case _:
            return value
