"""The log: one line an event, in the form the article prints.

    TEACHING/SCHEDULE_PREFILL | phase=prefill | reason=waiting queue has admissible requests
        | stats={engine_step=1, scheduled=2, waiting_len=0, running_len=2}      (on one line)
    temperatures=[0.6, 0.6] -> token_ids=[335, 335] seq_ids=[0, 1]
    step#1 prefill done in 772.24ms num_tokens_stat=30 finished_this_step=[]

Two events have a second line, with the numbers that a reader checks by hand:

    allocate_kv_cache: total_mem=95.09GiB free=93.43GiB ... -> num_kvcache_blocks=3052 ...
    decode detail: bs=2 input_ids.shape=(2,) context_lens=[12, 18] slot_mapping=[11, 273] ...

Knows the form of a line. Does not know colours, files or which events to show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvtrace import events as ev
from nvtrace.envelope import Unknown
from nvtrace_cli.views.text import escape

if TYPE_CHECKING:
    from nvtrace.catalog import Catalog


_DEEPEST = 16
_MOST_SEQUENCES = 8  # of a decode, whose numbers are in its second line


def log_lines(event: ev.Event | Unknown, catalog: Catalog, rank: int = 0) -> list[str]:
    """The same line, and the second line of the events that have one."""
    lines = [_log_line(event, catalog)]
    match event:
        case ev.KvBudgetEstimate():
            lines.append(catalog.ui("log_kv_cache", facts=_budget(event)))
        case ev.PrepareDecodeTensors():
            lines.append(catalog.ui("log_decode", facts=_layout(event)))
    return [f"rank={rank} | {line}" if rank else line for line in lines]


def _budget(event: ev.KvBudgetEstimate) -> str:
    sizes = {
        "total_mem": event.total_bytes,
        "free": event.free_bytes,
        "used": event.used_bytes,
        "peak_alloc": event.peak_bytes,
        "curr_alloc": event.current_bytes,
    }
    facts = [f"{name}={size / 2**30:.2f}GiB" for name, size in sizes.items() if size is not None]
    facts.append(f"gpu_memory_utilization={event.utilization:g}")
    shape = (2, event.num_layers, event.num_blocks, event.block_size, event.num_kv_heads)
    return (
        f"{' '.join(facts)} -> num_kvcache_blocks={event.num_blocks} "
        f"block_size={event.block_size} kv_cache.shape={(*shape, event.head_dim)}"
    )


def _layout(event: ev.PrepareDecodeTensors) -> str:
    first, rest = slice(_MOST_SEQUENCES), event.batch_size > _MOST_SEQUENCES
    lens, slots = (
        _value([*values[first], *(["..."] if rest else [])])
        for values in (event.context_lens, event.slot_mapping)
    )
    return (
        f"bs={event.batch_size} input_ids.shape=({event.batch_size},) context_lens={lens} "
        f"slot_mapping={slots} block_tables.shape={_value(event.block_tables_shape)}"
    )


def log_line(event: ev.Event | Unknown, catalog: Catalog, rank: int = 0) -> str:
    """One event in one line, without a newline; that of another rank than 0 begins with it."""
    line = _log_line(event, catalog)
    return f"rank={rank} | {line}" if rank else line


def _log_line(event: ev.Event | Unknown, catalog: Catalog) -> str:
    match event:
        case ev.StepEnd():
            kind, wall_ms = escape(event.batch_phase), event.wall_ns / 1e6
            return (
                f"step#{event.step} {kind} done in {wall_ms:.2f}ms "
                f"num_tokens_stat={event.num_tokens_stat} finished_this_step={event.finished}"
            )
        case ev.SampleTokens():
            return (
                f"temperatures={_value(event.temperatures)} -> "
                f"token_ids={event.token_ids} seq_ids={event.seq_ids}"
            )
        case Unknown():
            facts = [(name, value) for name, value in event.fields.items() if name != "event"]
            return f"TEACHING/{escape(event.event)} | stats={_stats(facts)}"
    tag = ev.tag_of(event)
    parts = [f"TEACHING/{tag}", f"phase={escape(event.phase)}"]
    reason = getattr(event, "reason", None)
    if reason is not None:
        parts.append(f"reason={escape(catalog.reason(tag, reason))}")
    if isinstance(event, ev.StateTransition):
        parts.append(f"result={escape(event.previous)} -> {escape(event.status)}")
    if event.log_fields:
        facts = [(name, getattr(event, name)) for name in event.log_fields]
        parts.append(f"stats={_stats([fact for fact in facts if fact != ('peak_gib', None)])}")
    return " | ".join(parts)


def _stats(facts: list[tuple[str, object]], depth: int = 0) -> str:
    parts = [f"{escape(name)}={_value(value, depth)}" for name, value in facts]
    return "{" + ", ".join(parts) + "}"


def _value(value: object, depth: int = 0) -> str:
    """A value as it is written. What lies too deep in others is of no event of ours."""
    if depth > _DEEPEST:
        return "..."
    match value:
        case float():
            text = f"{value:g}"
        case str():
            text = escape(value)
        case list():
            text = "[" + ", ".join(_value(item, depth + 1) for item in value) + "]"
        case tuple():
            items = ", ".join(_value(item, depth + 1) for item in value)
            text = "(" + items + ("," if len(value) == 1 else "") + ")"
        case dict():
            text = _stats(list(value.items()), depth + 1)
        case _:
            text = str(value)
    return text
