"""Export: a trace in the formats of other tools, one module a format.

    perfetto.py         a timeline for ui.perfetto.dev      lines of one JSON document
    otlp.py             spans for OpenTelemetry             JSON lines
    otlp_http.py        the same, sent to a receiver        protobuf over HTTP
    prometheus.py       totals for Prometheus               lines of its text format
    csv_tables.py       one file per kind of event          a folder
    parquet_tables.py   one data set per kind of event      a folder

Every exporter streams: it keeps unfinished requests and steps, never the trace. Text is quoted by
each format's own rules, and text lines have no control characters. A trace's integers have up to 64
bits, signed or unsigned: a module writes those that its format cannot hold as text, or refuses
them. Needs neither the engine nor torch.
"""

from __future__ import annotations

import json
import math
from typing import Any


class ExportError(ValueError):
    """The trace cannot be converted to the format."""


def json_text(value: object) -> str:
    """JSON on one line, in ASCII, so that no text of a trace can act as a control character."""
    return _encode(value, ensure_ascii=True)


def json_cell(value: object) -> str:
    """JSON for a table's cell, not limited to ASCII."""
    return _encode(value, ensure_ascii=False)


def _encode(value: object, *, ensure_ascii: bool) -> str:
    """JSON has no NaN and no infinity: where they occur, they are strings, as protobuf's are."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, separators=(",", ":"), allow_nan=False)
    try:
        return encoder.encode(value)
    except ValueError:
        return encoder.encode(_spelled(value))


def _spelled(value: Any) -> Any:  # noqa: ANN401 - any JSON
    match value:
        case dict():
            return {key: _spelled(item) for key, item in value.items()}
        case list() | tuple():
            return [_spelled(item) for item in value]
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
