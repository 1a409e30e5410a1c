"""Claims: fields of a step's events, beside the values that follow from earlier events.

    PREPARE_DECODE_TENSORS   slot_mapping   said [12, 14, 20]   follows [11, 14, 19]

They differ if the engine has a fault. Only what `nvtrace at` shows is compared: the state and the
batch's tensors. `nvtrace.check` checks the rest of a trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvtrace import events as ev

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvtrace.at import Inputs
    from nvtrace.replay import State


@dataclass(frozen=True, slots=True)
class Claim:
    """One field of an event.

    Attributes:
        event_id, event: which event, and its name.
        field: the field.
        said: the value that the trace records.
        follows: the value that follows from earlier events.
    """

    event_id: int
    event: str
    field: str
    said: Any
    follows: Any

    @property
    def holds(self) -> bool:
        """Are both the same?"""
        return bool(self.said == self.follows)


def claims_of(event: ev.Event, state: State, inputs: Inputs) -> Iterator[Claim]:
    """The claims of one event.

    Args:
        event: one of the step's, from its schedule on.
        state: the state after the event.
        inputs: the step's.
    """
    for field, follows in _facts(event, state, inputs).items():
        yield Claim(event.event_id, ev.tag_of(event), field, getattr(event, field), follows)


def _facts(event: ev.Event, state: State, inputs: Inputs) -> dict[str, Any]:
    num_seqs, num_tokens = len(inputs.context_lens), inputs.num_tokens
    queues = {
        "waiting_len": len(state.waiting),
        "running_len": len(state.running),
        "free_blocks": len(state.free_blocks),
    }
    facts: dict[str, Any] = {}
    match event:
        case ev.ScheduleDecode():
            facts = {"scheduled": num_seqs} | queues
        case ev.SchedulePrefill() | ev.ScheduleMixed():
            seqs = [state.sequences[seq_id] for seq_id in event.seq_ids]
            facts = {
                "scheduled": num_seqs,
                "num_batched_tokens": num_tokens,
                "num_computed_tokens": [seq.num_computed_tokens for seq in seqs],
                "num_cached_tokens": [seq.num_cached_tokens for seq in seqs],
            } | queues
        case ev.PreparePrefillTensors():
            facts = _flat_layout(inputs)
        case ev.PrepareDecodeTensors():
            tables = (len(state.sequences[run.seq_id].block_table) for run in inputs.runs)
            facts = {
                "batch_size": num_seqs,
                "context_lens": [*inputs.context_lens],
                "slot_mapping": [run.first_slot for run in inputs.runs],
                "block_tables_shape": (num_seqs, max(tables, default=0)),
            }
        case ev.RunEager():
            facts = {"num_tokens": num_tokens}
        case ev.CudagraphReplay():
            rest = event.graph_batch_size - event.batch_size
            facts = {"batch_size": num_seqs, "padding": rest}
        case ev.StepEnd():
            facts = {"num_seqs": num_seqs, "num_batched_tokens": num_tokens} | queues
    return facts


def _flat_layout(inputs: Inputs) -> dict[str, Any]:
    lengths, ends = inputs.lengths, inputs.context_lens
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    return {
        "flat_tokens": inputs.num_tokens,
        "n_seqs": len(ends),
        "max_seqlen_q": max(lengths, default=0),
        "max_seqlen_k": max(ends, default=0),
        "has_block_tables": any(starts),
        "cu_seqlens_q": [*inputs.cu_seqlens_q],
        "cu_seqlens_k": [*inputs.cu_seqlens_k],
        "position_ranges": [(start, end - 1) for start, end in zip(starts, ends, strict=True)],
        "slot_ranges": [(run.first_slot, run.last_slot) for run in inputs.runs],
    }


def said_slots(layout: ev.Layout | None, num_tokens: int) -> list[int] | None:
    """(num_tokens,) the slot of each row of the batch; None if the trace does not record each.

    Args:
        layout: the event that records them.
        num_tokens: rows of the batch.
    """
    match layout:
        case ev.PrepareDecodeTensors():
            return layout.slot_mapping if len(layout.slot_mapping) == num_tokens else None
        case ev.PreparePrefillTensors():
            lengths = [last - first + 1 for first, last in layout.slot_ranges]
            if sum(lengths) != num_tokens or min(lengths, default=1) < 1:
                return None
            return [s for first, last in layout.slot_ranges for s in range(first, last + 1)]
    return None
