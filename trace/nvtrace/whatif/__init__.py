"""What if: run a recorded workload again with other settings, without a model.

recording = read_recording(read_trace("trace.jsonl"))
settings = recording.settings.changed({"policy": "mixed"})
outcome = rerun(recording, settings, recording.step_times())

recording.py   a trace -> arrivals, aborts, generated tokens, step times
settings.py    the settings that can be changed, and their values
rerun.py       the engine's own Scheduler and BlockManager, with the recorded tokens
recorder.py    the recorder of such a run, with a simulated clock
compare.py     several runs -> the rows of one table
"""

from nvtrace.whatif.compare import RunRow, recorded_row, simulated_row
from nvtrace.whatif.recording import Recording, read_recording
from nvtrace.whatif.rerun import Arrivals, RerunResult, rerun
from nvtrace.whatif.settings import Settings, WhatIfError, parse_changes

__all__ = [
    "Arrivals",
    "Recording",
    "RerunResult",
    "RunRow",
    "Settings",
    "WhatIfError",
    "parse_changes",
    "read_recording",
    "recorded_row",
    "rerun",
    "simulated_row",
]
