"""Export: a trace in the formats of other tools, one module a format.

    perfetto.py         a timeline for ui.perfetto.dev      lines of one JSON document
    otlp.py             spans for OpenTelemetry             JSON lines
    prometheus.py       totals for Prometheus               lines of its text format
    csv_tables.py       one file per kind of event          a folder
    parquet_tables.py   one data set per kind of event      a folder

Every exporter takes records and streams: it keeps what is under way, never the trace. Text of a
prompt is data everywhere: each format's own quoting carries it, and what is printed as lines is
free of control characters.

Knows formats. Does not know the command line, and needs neither the engine nor torch.
"""

from __future__ import annotations

import json


class ExportError(ValueError):
    """The trace cannot be put into the format that was asked for."""


def json_text(value: object) -> str:
    """JSON on one line, in ASCII: whatever a trace holds, it moves no cursor and breaks no line."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))
