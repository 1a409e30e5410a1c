"""Steps and events as JSON, one object a line, for other programs.

A step has the keys of `step_object`. Queues and free pages are those after the decision;
`waiting` and `running` list the queues at the step's end. Times are in nanoseconds.

Knows the keys. Does not know what is shown to people.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from nvtrace.envelope import Unknown
from nvtrace_cli.views.console import is_terminal
from nvtrace_cli.views.text import escape_json

if TYPE_CHECKING:
    from nvtrace.envelope import Record
    from nvtrace.summary import StepSummary


def json_line(value: object) -> str:
    """Any value as one line of JSON."""
    return fit_for_stdout(msgspec.json.encode(value).decode())


def fit_for_stdout(line: str) -> str:
    """JSON as it is; on a terminal, which would obey them, with its control characters escaped."""
    return escape_json(line) if is_terminal() else line


def record_line(record: Record, rank: int = 0) -> str:
    """A record as it stands in its trace; that of another rank than 0 says so besides."""
    fields = record.fields if isinstance(record, Unknown) else record
    return json_line(msgspec.to_builtins(fields) | {"rank": rank} if rank else fields)


def step_object(step: StepSummary) -> dict[str, Any]:
    """One step."""
    stop = step.stop
    return {
        "engine_step": step.index,
        "phase": step.phase,
        "reason": step.reason,
        "scheduled": step.scheduled,
        "seq_ids": step.seq_ids,
        "num_scheduled_tokens": [share.num_tokens for share in step.shares],
        "num_batched_tokens": step.num_batched_tokens,
        **{
            name: None if step.is_led else getattr(step, name)
            for name in ("waiting_len", "running_len", "free_blocks", "waiting", "running")
        },
        "arrived": step.arrived,
        "aborted": step.aborted,
        "admitted": step.admitted,
        "preempted": [
            {"seq_id": event.seq_id, "for_seq_id": event.for_seq_id} for event in step.preempted
        ],
        "finished": [{"seq_id": seq_id, "reason": reason} for seq_id, reason in step.finished],
        "admission_stop": None
        if stop is None
        else {"seq_id": stop.seq_id, "reason": stop.reason, "need": stop.need, "have": stop.have},
        "num_blocks_taken": step.blocks.num_taken,
        "num_blocks_reused": step.blocks.num_reused,
        "num_blocks_published": step.blocks.num_hashed,
        "num_blocks_evicted": step.blocks.num_evicted,
        "num_blocks_freed": step.blocks.num_freed,
        "error": None if step.error is None else step.error.error_type,
        "start_ns": step.start_ns,
        "wall_ns": step.wall_ns,
    }
