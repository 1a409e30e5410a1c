"""Parquet: a warehouse of traces that DuckDB or Spark query without us.

    WAREHOUSE/STEP_END/run_id=5f0c.../rank=0/part.parquet        one data set per kind of event
              REQUEST_ENQUEUE/run_id=5f0c.../rank=0/part.parquet

    SELECT run_id, sum(num_batched_tokens) FROM read_parquet(
        'WAREHOUSE/STEP_END/**/*.parquet', hive_partitioning=true) GROUP BY run_id

The folders are Hive's partitions: run and rank are columns that come from the path. Exporting a run
again replaces its files and touches no other run's. Lists stay lists; what has no fixed shape
(`TRACE_HEADER.config`) is JSON.

pyarrow is loaded at the first use.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin
from urllib.parse import quote

from nvtrace.envelope import Header
from nvtrace.export import ExportError, json_cell
from nvtrace.export.tables import TABLES, row_of, table_of
from nvtrace.files import atomic_writes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from nvtrace.envelope import Record
    from nvtrace.export.tables import TableColumn

_PARTITIONS = {"run_id", "rank"}  # in the path, not in the file
_ROWS_PER_GROUP = 4096
_LONGEST_RUN_ID = 200  # of a folder's name, which may have 255 bytes


def write(records: Iterable[tuple[int, Record]], folder: Path) -> int:
    """Write a run's part of the warehouse: all of its files, or none.

    Args:
        records: what `read_ranks` yields.
        folder: the warehouse; made if it is not there.

    Returns:
        The number of rows.

    Raises:
        ExportError: pyarrow is missing, or a number of the trace is too large for its column.
        OSError: a file cannot be written.
    """
    arrow = _load("pyarrow")
    _load("pyarrow.parquet")
    num_rows = 0
    run_ids: dict[int, str] = {}
    parts: dict[tuple[str, int], _Part] = {}
    with atomic_writes() as draft_of, ExitStack() as files:
        for rank, record in records:
            if isinstance(record, Header):
                run_ids[rank] = record.run_id
            key = (table_of(record), rank)
            if key not in parts:
                run_id = quote(run_ids[rank], safe="")[:_LONGEST_RUN_ID]
                place = folder / key[0] / f"run_id={run_id}" / f"rank={rank}"
                parts[key] = _Part(arrow, draft_of(place / "part.parquet"), key[0])
                files.callback(parts[key].close)
            parts[key].add(row_of(record))
            num_rows += 1
        for part in parts.values():
            part.flush()
    return num_rows


class _Part:
    """One file, written a row group at a time.

    Args:
        arrow: the module pyarrow.
        file: the draft to write to; its name is not that of a data file, so queries skip it.
        table: the name of its table.
    """

    def __init__(self, arrow: Any, file: Path, table: str) -> None:  # noqa: ANN401 - pyarrow has no types
        self._arrow = arrow
        self._table = table
        self._columns = TABLES[table]
        kept = [column for column in self._columns if column.name not in _PARTITIONS]
        self._schema = arrow.schema([(column.name, _arrow_type(arrow, column)) for column in kept])
        self._rows: list[tuple[Any, ...]] = []
        self._writer = arrow.parquet.ParquetWriter(file, self._schema)

    def add(self, row: tuple[Any, ...]) -> None:
        """Take in a row; every few thousand are written."""
        self._rows.append(row)
        if len(self._rows) >= _ROWS_PER_GROUP:
            self.flush()

    def flush(self) -> None:
        """Write the rows that are there."""
        if not self._rows:
            return
        values = zip(self._columns, zip(*self._rows, strict=True), strict=True)
        arrays = []
        for column, cells in values:
            if column.name in _PARTITIONS:
                continue
            plain = [json_cell(cell) if isinstance(cell, dict) else cell for cell in cells]
            arrays.append(self._array(column.name, plain))
        self._writer.write_table(self._arrow.table(arrays, schema=self._schema))
        self._rows = []

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _array(self, name: str, cells: list[Any]) -> Any:  # noqa: ANN401 - pyarrow has no types
        try:
            return self._arrow.array(cells, self._schema.field(name).type)
        except (OverflowError, self._arrow.ArrowInvalid) as error:
            raise ExportError(
                f"{self._table}.{name} holds a value that fits no column of its type ({error}): "
                "`nvtrace validate` and `nvtrace check` say what is wrong with the trace"
            ) from error


def _arrow_type(arrow: Any, column: TableColumn) -> Any:  # noqa: ANN401 - pyarrow has no types
    """As `int | None` -> int64, `list[list[str]]` -> list of lists of strings, a dict -> text."""
    if column.name == "seed":
        return arrow.uint64()  # a seed has all 64 bits; all other integers are signed
    return _type_of(arrow, column.type)


def _type_of(arrow: Any, annotation: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in {Union, UnionType}:
        return _type_of(arrow, next(part for part in arguments if part is not NoneType))
    if origin in {list, tuple}:
        return arrow.list_(_type_of(arrow, arguments[0]))
    if origin is Annotated:
        return _type_of(arrow, arguments[0])
    if origin is dict:
        return arrow.string()
    kinds = {bool: arrow.bool_, int: arrow.int64, float: arrow.float64, str: arrow.string}
    return kinds[annotation]()


def _load(module: str) -> Any:  # noqa: ANN401 - a module
    try:
        return import_module(module)
    except ImportError as error:
        raise ExportError(
            "Parquet needs pyarrow, which is not installed: pip install 'nanovllm-nvtrace[parquet]'"
        ) from error
