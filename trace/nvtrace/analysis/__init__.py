"""Analysis: traces as pandas DataFrames, analyses of them, and plots.

    columns                    what is in each DataFrame: names, dtypes, units, meanings
    trace                      Trace, load
      records, cells           a trace in memory, column by column
      steps, requests, blocks  the frames that are more than one event's table
    latency, batches, kv_cache   analyses: functions from DataFrames to a DataFrame
    plots                      plots: each takes a DataFrame and a matplotlib Axes

Only this package imports pandas, and only `plots` matplotlib. Names are loaded at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvtrace.analysis.batches import (
        batch_occupancy,
        byte_floor,
        graph_padding,
        static_waste,
        step_time_by_class,
    )
    from nvtrace.analysis.kv_cache import kv_use, memory_budget, prefix_hits
    from nvtrace.analysis.latency import (
        latency_breakdown,
        preemption_cost,
        request_spans,
        waiting_by_reason,
    )
    from nvtrace.analysis.trace import Trace, load

_HOMES = {
    "batch_occupancy": "batches",
    "byte_floor": "batches",
    "graph_padding": "batches",
    "static_waste": "batches",
    "step_time_by_class": "batches",
    "latency_breakdown": "latency",
    "preemption_cost": "latency",
    "request_spans": "latency",
    "waiting_by_reason": "latency",
    "kv_use": "kv_cache",
    "memory_budget": "kv_cache",
    "prefix_hits": "kv_cache",
    "Trace": "trace",
    "load": "trace",
}
__all__ = [
    "Trace",
    "batch_occupancy",
    "byte_floor",
    "graph_padding",
    "kv_use",
    "latency_breakdown",
    "load",
    "memory_budget",
    "preemption_cost",
    "prefix_hits",
    "request_spans",
    "static_waste",
    "step_time_by_class",
    "waiting_by_reason",
]


if not TYPE_CHECKING:  # to a type checker, a module with this function has every name

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
