"""NextStep: what the next step will be, if nobody comes or goes in between.

Asked before `Scheduler.postprocess`, and first even before the step's tokens are there, so that a
GPU can begin the next step while the host still ends this one. Whatever happens in between (a
request comes, say) makes it a wrong guess. A wrong guess costs time, and never changes a result.

Reads the scheduler's queues and the pool's free list. Changes nothing, and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class NextStep:
    """The next step: this batch again, each sequence one token further.

    Attributes:
        ending: indices in this batch of those that end with this step's tokens.
        continuing: indices of the others: the next step's batch.
        new_blocks: the (index, block) of each sequence that gets a block before its next token.
        seqs: the next step's sequences.
        positions: where the next token of each is.
    """

    ending: list[int]
    continuing: list[int]
    new_blocks: list[tuple[int, int]]
    seqs: list[Sequence]
    positions: list[int]

    def rows_of(self, batch: Batch) -> list[int] | None:
        """Which of `seqs` are in the batch that was scheduled, if the others have ended.

        Returns:
            Their indices; None if it is another step than was foreseen.
        """
        if batch.num_prefills:
            return None
        block_of = dict(self.new_blocks)
        rows, wanted = [], iter(batch.seqs)
        seq = next(wanted, None)
        for row, candidate in enumerate(self.seqs):
            if candidate is seq:
                block_id = block_of.get(self.continuing[row])
                is_there = block_id is None or seq.block_table[-1] == block_id
                if not is_there or seq.num_computed_tokens != self.positions[row]:
                    return None
                rows.append(row)
                seq = next(wanted, None)
            elif candidate.finish_reason is None:
                return None
        return rows if seq is None else None


def predict_next_step(
    scheduler: Scheduler, batch: Batch, token_ids: list[int] | None = None
) -> NextStep | None:
    """Will the next step be this one again, one token further?

    Args:
        scheduler: that chose the batch.
        batch: the step under way.
        token_ids: one sampled token for each of `batch.sampled_seqs`; None if unknown yet. Then
            only those are foreseen to end that have reached their length.

    Returns:
        What the next step will be; None for another step, or where it cannot be told.
    """
    if scheduler.waiting or batch.num_prefills or len(batch.seqs) < len(scheduler.running):
        return None
    block_size = scheduler.block_manager.block_size
    ending, continuing, takers, may_end = [], [], [], False
    for index, seq in enumerate(batch.seqs):
        num_tokens = len(seq.token_ids) + 1  # with this step's
        if num_tokens >= seq.max_num_tokens or (
            token_ids is not None and token_ids[index] in seq.end_token_ids
        ):
            ending.append(index)
            continue
        continuing.append(index)
        # Whether a stop string is reached, only the text tells.
        may_end |= bool(seq.sampling_params.stop or (token_ids is None and seq.end_token_ids))
        if num_tokens > len(seq.block_table) * block_size:
            takers.append(index)
    if not continuing or (may_end and takers):
        return None  # the blocks of one that ends would be taken first
    seqs_ending = [batch.seqs[index] for index in ending]
    block_ids = next_blocks(scheduler.block_manager, len(takers), seqs_ending)
    if block_ids is None:
        return None
    seqs = [batch.seqs[index] for index in continuing]
    positions = [seq.num_computed_tokens + 1 for seq in seqs]
    return NextStep(ending, continuing, list(zip(takers, block_ids, strict=True)), seqs, positions)


def next_blocks(pool: BlockManager, num_blocks: int, ending: list[Sequence]) -> list[int] | None:
    """The blocks that will be taken next, once `ending` have given theirs back.

    Returns:
        None if there are not so many, or one of them still holds something cached, or that cannot
        be told yet: the last block of one that ends is full, and about to be cached.
    """
    is_filled = any(seq.num_tokens % pool.block_size == 0 for seq in ending)
    if num_blocks and is_filled and pool.enable_prefix_caching:
        return None
    returned = (  # to the list's head, by `deallocate`; the others go to its end
        block_id
        for seq in reversed(ending)
        for block_id in seq.block_table
        if pool.block_hashes[block_id] is None
    )
    block_ids = list(islice(chain(returned, pool.free_blocks), num_blocks))
    if len(block_ids) < num_blocks or any(pool.block_hashes[b] for b in block_ids):
        return None
    return block_ids
