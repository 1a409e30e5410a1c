"""Snapshot: an engine's whole state as a value, taken from the engine or from its trace's fold.

Knows both sides' field names and nothing else. What is equal here is equal in every queue, page,
reference count, hash and token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.engine.sequence import Sequence
    from nvtrace.replay import State


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """One request."""

    token_ids: list[int]
    block_table: list[int]
    num_computed_tokens: int
    num_cached_tokens: int
    num_prefill_tokens: int
    num_completion_tokens: int
    status: str
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Queues, requests and the page pool."""

    waiting: list[int]
    running: list[int]
    sequences: dict[int, SequenceSnapshot]
    ref_counts: list[int]
    free_blocks: list[int]  # in the order in which they will be taken
    block_hashes: dict[int, str]
    cached_blocks: dict[str, int]


def snapshot_of_engine(scheduler: Scheduler, sequences: Mapping[int, Sequence]) -> Snapshot:
    """The engine's own word."""
    pool = scheduler.block_manager
    hashes = enumerate(pool.block_hashes)
    return Snapshot(
        waiting=[seq.seq_id for seq in scheduler.waiting],
        running=[seq.seq_id for seq in scheduler.running],
        sequences={
            seq_id: SequenceSnapshot(
                token_ids=list(seq.token_ids),
                block_table=list(seq.block_table),
                num_computed_tokens=seq.num_computed_tokens,
                num_cached_tokens=seq.num_cached_tokens,
                num_prefill_tokens=seq.num_prefill_tokens,
                num_completion_tokens=seq.num_completion_tokens,
                status=str(seq.status),
                finish_reason=seq.finish_reason,
            )
            for seq_id, seq in sequences.items()
        },
        ref_counts=list(pool.ref_counts),
        free_blocks=list(pool.free_blocks),
        block_hashes={block_id: h.hex() for block_id, h in hashes if h is not None},
        cached_blocks={h.hex(): block_id for h, block_id in pool.cached_blocks.items()},
    )


def snapshot_of_fold(state: State) -> Snapshot:
    """What the trace says."""
    return Snapshot(
        waiting=list(state.waiting),
        running=list(state.running),
        sequences={
            seq_id: SequenceSnapshot(
                token_ids=list(seq.token_ids),
                block_table=list(seq.block_table),
                num_computed_tokens=seq.num_computed_tokens,
                num_cached_tokens=seq.num_cached_tokens,
                num_prefill_tokens=seq.num_prefill_tokens,
                num_completion_tokens=seq.num_completion_tokens,
                status=seq.status,
                finish_reason=seq.finish_reason,
            )
            for seq_id, seq in state.sequences.items()
        },
        ref_counts=list(state.ref_counts),
        free_blocks=list(state.free_blocks),
        block_hashes=dict(state.block_hashes),
        cached_blocks=dict(state.cached_blocks),
    )
