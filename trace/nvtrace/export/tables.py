"""Tables: a trace as one table per kind of event, with the struct's fields as columns.

    STEP_END        event_id  ts_ns  step  phase  batch_phase  num_seqs  ...
    TRACE_HEADER    schema  version  run_id  rank ...                            a row a run
    UNKNOWN         event  fields                                    of a newer nvtrace

`csv_tables.py` and `parquet_tables.py` write the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvtrace.envelope import Footer, Header, Record, Unknown
from nvtrace.events import EVENT_TYPES, field_types

if TYPE_CHECKING:
    import msgspec

_STRUCTS: dict[str, type[msgspec.Struct]] = {
    "TRACE_HEADER": Header,
    **EVENT_TYPES,
    "TRACE_FOOTER": Footer,
    "UNKNOWN": Unknown,
}


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column.

    Attributes:
        type: the field's annotation, in Python's types.
    """

    name: str
    type: Any


TABLES: dict[str, tuple[TableColumn, ...]] = {
    name: tuple(TableColumn(field, type_) for field, type_ in field_types(struct).items())
    for name, struct in _STRUCTS.items()
}


def table_of(record: Record) -> str:
    """The name of the record's table: never a name that comes from the trace."""
    if isinstance(record, Unknown):
        return "UNKNOWN"
    return str(record.__struct_config__.tag)


def row_of(record: Record) -> tuple[Any, ...]:
    """The record's values, in the order of its table's columns."""
    return tuple(getattr(record, name) for name in record.__struct_fields__)
