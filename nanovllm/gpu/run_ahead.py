"""predict_next_step: what the next step will be, so that a GPU can run ahead.

It is called before `Scheduler.postprocess`, first even before the step's tokens are known, so that
a GPU can begin the next step while the host still ends this one. The prediction may be wrong: a
request may arrive in between, say. A wrong prediction costs time, but never changes a result.

It reads the scheduler's queues and the pool's free list and changes nothing. Imports no torch.
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
    """A prediction of the next step: a decode of this batch, without the sequences that end.

    Attributes:
        ending: indices in this batch of the sequences that end with this step's tokens.
        continuing: indices of the others: the next step's batch.
        new_blocks: (index, block id) of each sequence that gets a new block for its next token.
        seqs: the next step's sequences.
        positions: the position of each sequence's next token.
    """

    ending: list[int]
    continuing: list[int]
    new_blocks: list[tuple[int, int]]
    seqs: list[Sequence]
    positions: list[int]

    def rows_of(self, batch: Batch) -> list[int] | None:
        """Compare the prediction with the batch that was scheduled.

        Returns:
            The indices in `seqs` of the batch's sequences, if all others have ended; None if the
            prediction was wrong.
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
    """Predict whether the next step is a decode of the same batch, or of what is left of it.

    Args:
        scheduler: the scheduler that chose the batch.
        batch: of the step in progress.
        token_ids: one sampled token for each of `batch.sampled_seqs`; None if not known yet. Then
            only the sequences that reach their length are predicted to end.

    Returns:
        The next step; None if it will be another kind of step, or cannot be predicted.
    """
    if scheduler.waiting or batch.num_prefills or len(batch.seqs) < len(scheduler.running):
        return None
    block_size = scheduler.block_manager.block_size
    ending, continuing, need_block, may_end = [], [], [], False
    for index, seq in enumerate(batch.seqs):
        num_tokens = len(seq.token_ids) + 1  # with this step's
        if num_tokens >= seq.max_num_tokens or (
            token_ids is not None and token_ids[index] in seq.end_token_ids
        ):
            ending.append(index)
            continue
        continuing.append(index)
        # A stop string can be found only when the tokens are decoded to text, which is later.
        may_end |= bool(seq.sampling_params.stop or (token_ids is None and seq.end_token_ids))
        if num_tokens > len(seq.block_table) * block_size:
            need_block.append(index)
    if not continuing or (may_end and need_block):
        return None  # if a sequence ends, its blocks are taken before those of the free list
    seqs_ending = [batch.seqs[index] for index in ending]
    block_ids = next_blocks(scheduler.block_manager, len(need_block), seqs_ending)
    if block_ids is None:
        return None
    seqs = [batch.seqs[index] for index in continuing]
    positions = [seq.num_computed_tokens + 1 for seq in seqs]
    new_blocks = list(zip(need_block, block_ids, strict=True))
    return NextStep(ending, continuing, new_blocks, seqs, positions)


def next_blocks(pool: BlockManager, num_blocks: int, ending: list[Sequence]) -> list[int] | None:
    """The blocks that will be taken next, after the blocks of `ending` were freed.

    Returns:
        None if there are not enough, or if one of them is hashed, or if this is not known yet: the
        last block of a sequence that ends is full, and will be hashed.
    """
    is_filled = any(seq.num_tokens % pool.block_size == 0 for seq in ending)
    if num_blocks and is_filled and pool.enable_prefix_caching:
        return None
    returned = (  # to the head of the free list, by `deallocate`; hashed ones go to its tail
        block_id
        for seq in reversed(ending)
        for block_id in seq.block_table
        if pool.block_hashes[block_id] is None
    )
    block_ids = list(islice(chain(returned, pool.free_blocks), num_blocks))
    if len(block_ids) < num_blocks or any(pool.block_hashes[b] for b in block_ids):
        return None
    return block_ids
