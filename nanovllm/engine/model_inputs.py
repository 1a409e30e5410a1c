"""Batch -> the inputs of a forward pass, as plain lists. Pure functions.

`model_runner.py` turns the lists into tensors. vLLM's counterpart is `prepare_inputs` in
`vllm/v1/worker/gpu/model_runner.py`.

A block of block_size tokens has block_size slots; slot = block * block_size + offset in the block.
Two sequences of 11 and 17 tokens, blocks of 256, block tables [0] and [1]:

    input_ids     a0 a1 ... a10 | b0  b1  ... b16        28 tokens in one row
    positions      0  1 ...  10 |  0   1  ...  16        for RoPE
    cu_seqlens_q   0             11              28      where each sequence starts and ends
    slot_mapping   0  1 ...  10 | 256 257 ... 272        where K and V are written

and in the next step, one token each:

    positions     11, 17    slot_mapping   11, 273    context_lens   12, 18
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanovllm.engine.batch import Batch, Phase
    from nanovllm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """The inputs of a step in which each sequence may compute any number of tokens.

    Attributes:
        input_ids: (num_tokens,) all new tokens, one sequence after the other.
        positions: (num_tokens,) each token's index in its sequence.
        slot_mapping: (num_tokens,) the slot that its K and V are written to.
        position_ranges: per sequence, its first and last position in this step.
        slot_ranges: the same slots as `slot_mapping`, as ranges (first, last).
        cu_seqlens_q: (num_seqs + 1,) cumulative number of new tokens.
        cu_seqlens_k: (num_seqs + 1,) cumulative length of the contexts that they attend to.
        max_seqlen_q, max_seqlen_k: the longest of each.
        context_lens: (num_seqs,) how many tokens each sequence attends to.
        block_tables: (num_seqs, max_num_blocks), padded with 0; None if no sequence has anything in
            the cache yet, so that attention can use the new K and V directly.
        logits_indices: (num_sampled,) rows of the flat batch whose next token is sampled.
    """

    input_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    position_ranges: list[tuple[int, int]]
    slot_ranges: list[tuple[int, int]]
    cu_seqlens_q: list[int]
    cu_seqlens_k: list[int]
    max_seqlen_q: int
    max_seqlen_k: int
    context_lens: list[int]
    block_tables: list[list[int]] | None
    logits_indices: list[int]


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The inputs of a step in which each sequence computes one token.

    Attributes:
        input_ids: (num_seqs,) each sequence's last token.
        positions: (num_seqs,) its index.
        slot_mapping: (num_seqs,) the slot that its K and V are written to.
        context_lens: (num_seqs,) how many tokens it attends to, including itself.
        block_tables: (num_seqs, max_num_blocks), padded with 0.
    """

    input_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]

    # One token of each sequence: row i belongs to sequence i, and every row is sampled.
    cu_seqlens_q = cu_seqlens_k = ()
    max_seqlen_q = 1
    logits_indices = None

    @property
    def max_seqlen_k(self) -> int:
        """The longest context."""
        return max(self.context_lens)


@dataclass(frozen=True, slots=True)
class Step:
    """What every rank needs to compute its part of a step.

    Attributes:
        engine_step: the step's number.
        phase: the batch's.
        inputs: DecodeInputs for the phase "decode", else PrefillInputs.
    """

    engine_step: int
    phase: Phase
    inputs: PrefillInputs | DecodeInputs


def prepare_prefill(batch: Batch, block_size: int) -> PrefillInputs:
    """Prepare the inputs of a prefill or mixed batch."""
    input_ids: list[int] = []
    position_ranges: list[tuple[int, int]] = []
    slot_ranges: list[tuple[int, int]] = []
    logits_indices: list[int] = []
    sampled = set(batch.sampled_seqs)
    for seq, num_tokens in zip(batch.seqs, batch.num_scheduled_tokens, strict=True):
        start = seq.num_computed_tokens
        stop = start + num_tokens
        input_ids += seq.token_ids[start:stop]
        position_ranges.append((start, stop - 1))
        slot_ranges += _slot_ranges(seq.block_table, start, stop, block_size)
        if seq in sampled:
            logits_indices.append(len(input_ids) - 1)
    context_lens = [last + 1 for _, last in position_ranges]
    has_context = any(first > 0 for first, _ in position_ranges)
    return PrefillInputs(
        input_ids=input_ids,
        positions=_expand(position_ranges),
        slot_mapping=_expand(slot_ranges),
        position_ranges=position_ranges,
        slot_ranges=slot_ranges,
        cu_seqlens_q=list(accumulate(batch.num_scheduled_tokens, initial=0)),
        cu_seqlens_k=list(accumulate(context_lens, initial=0)),
        max_seqlen_q=max(batch.num_scheduled_tokens),
        max_seqlen_k=max(context_lens),
        context_lens=context_lens,
        block_tables=_pad_tables(batch.seqs) if has_context else None,
        logits_indices=logits_indices,
    )


def prepare_decode(batch: Batch, block_size: int) -> DecodeInputs:
    """Prepare the inputs of a decode batch."""
    positions = [seq.num_computed_tokens for seq in batch.seqs]
    return DecodeInputs(
        input_ids=[seq.token_ids[-1] for seq in batch.seqs],
        positions=positions,
        slot_mapping=[
            seq.block_table[position // block_size] * block_size + position % block_size
            for seq, position in zip(batch.seqs, positions, strict=True)
        ],
        context_lens=[position + 1 for position in positions],
        block_tables=_pad_tables(batch.seqs),
    )


def _slot_ranges(
    block_table: list[int], start: int, stop: int, block_size: int
) -> Iterator[tuple[int, int]]:
    """The slots of positions start..stop-1, one range (first, last) for each of their blocks."""
    while start < stop:
        offset = start % block_size
        num_tokens = min(stop - start, block_size - offset)
        first = block_table[start // block_size] * block_size + offset
        yield first, first + num_tokens - 1
        start += num_tokens


def _expand(ranges: list[tuple[int, int]]) -> list[int]:
    return list(chain.from_iterable(range(first, last + 1) for first, last in ranges))


def _pad_tables(seqs: list[Sequence]) -> list[list[int]]:
    width = max(len(seq.block_table) for seq in seqs)
    return [seq.block_table + [0] * (width - len(seq.block_table)) for seq in seqs]
