"""nvtrace: record what an engine says, read it back, replay it.

`record` needs the engine (the extra `engine`), and `load` pandas (the extra `frames`); everything
else works on a trace alone. Names are
loaded at their first use, so that reading a trace imports no engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvtrace.analysis.trace import Trace, load
    from nvtrace.envelope import NewerTraceError
    from nvtrace.reader import UnreadableTraceError, read_ranks, read_trace
    from nvtrace.recorder import Recorder, record
    from nvtrace.replay import State, fold_steps

_HOMES = {
    "load": "nvtrace.analysis.trace",
    "Trace": "nvtrace.analysis.trace",
    "record": "nvtrace.recorder",
    "Recorder": "nvtrace.recorder",
    "read_trace": "nvtrace.reader",
    "read_ranks": "nvtrace.reader",
    "UnreadableTraceError": "nvtrace.reader",
    "NewerTraceError": "nvtrace.envelope",
    "State": "nvtrace.replay",
    "fold_steps": "nvtrace.replay",
}
__all__ = [
    "NewerTraceError",
    "Recorder",
    "State",
    "Trace",
    "UnreadableTraceError",
    "fold_steps",
    "load",
    "read_ranks",
    "read_trace",
    "record",
]


if not TYPE_CHECKING:  # to a type checker, a module with this function has every name

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            try:
                return getattr(import_module(_HOMES[name]), name)
            except ModuleNotFoundError as error:
                from nvtrace.environment import with_advice  # noqa: PLC0415 - for errors only

                raise with_advice(error) from error
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
