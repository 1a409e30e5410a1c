"""derive_inputs: computes the other inputs of a decode step from the positions, on the GPU.

Only tokens, positions, block tables, seeds and temperatures are copied to the GPU, and for a step
with the same batch as the last one nothing is copied:

        position         p      of the token to compute; -1 in a row that is padding
        rope_positions   p      or 0 in a row that is padding: the rotary table has no row -1
        slot_mapping     table[p / block_size] * block_size + p % block_size, or -1
        context_lens     p + 1
        noise_keys       hash(seed, p + 1), for the token to be sampled
        is_greedy        temperature == 0

The oracles are `model_inputs.prepare_decode` and `sampler._noise_key`.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Triton has no types, and types a kernel's arguments itself.

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from triton import language as tl

from nanovllm.gpu.kernels.launch import require_shape

if TYPE_CHECKING:
    from torch import Tensor


def derive_inputs(
    positions: Tensor,
    block_tables: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    rope_positions: Tensor,
    slot_mapping: Tensor,
    context_lens: Tensor,
    noise_keys: Tensor,
    is_greedy: Tensor,
    block_size: int,
) -> None:
    """Fill the last five tensors from the first four.

    Args:
        positions: (num_seqs,) int64, -1 for padding.
        block_tables: (num_seqs, max_num_blocks) int32.
        seeds: (num_seqs,) int64, the 64 bits of each row's seed.
        temperatures: (num_seqs,) float32.
        rope_positions: (num_seqs,) int64, written.
        slot_mapping: (num_seqs,) int64, written.
        context_lens: (num_seqs,) int32, written.
        noise_keys: (2, num_seqs) int64, written: the lower and upper 32 bits.
        is_greedy: (num_seqs,) bool, written.
        block_size: tokens in a block.

    Raises:
        ValueError: a shape does not fit.
    """
    num_seqs = positions.shape[0]
    require_shape((num_seqs, None), block_tables=block_tables)
    require_shape((num_seqs,), seeds=seeds, temperatures=temperatures, is_greedy=is_greedy)
    require_shape((num_seqs,), rope_positions=rope_positions, slot_mapping=slot_mapping)
    require_shape((num_seqs,), context_lens=context_lens)
    require_shape((2, num_seqs), noise_keys=noise_keys)
    _derive_inputs[(num_seqs,)](
        *(positions, block_tables, seeds, temperatures),
        *(rope_positions, slot_mapping, context_lens, noise_keys, is_greedy),
        *(num_seqs, block_tables.shape[1]),
        block_size=block_size,
        num_warps=1,
    )


@triton.jit
def _derive_inputs(
    positions,
    block_tables,
    seeds,
    temperatures,
    rope_positions,
    slot_mapping,
    context_lens,
    noise_keys,
    is_greedy,
    num_seqs,
    table_width,
    block_size: tl.constexpr,
):
    row = tl.program_id(0)
    position = tl.load(positions + row)
    is_real = position >= 0
    tl.store(rope_positions + row, tl.maximum(position, 0))
    column = tl.maximum(position, 0) // block_size
    block = tl.load(block_tables + row * table_width + column, mask=is_real, other=0).to(tl.int64)
    slot = block * block_size + position % block_size
    tl.store(slot_mapping + row, tl.where(is_real, slot, -1))
    tl.store(is_greedy + row, tl.load(temperatures + row) == 0)
    tl.store(context_lens + row, (position + 1).to(tl.int32))
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    key = _splitmix64(_splitmix64(seed) ^ (position + 1).to(tl.uint64))
    tl.store(noise_keys + row, (key & 0xFFFFFFFF).to(tl.int64))
    tl.store(noise_keys + num_seqs + row, (key >> 32).to(tl.int64))


@triton.jit
def _splitmix64(x):
    """Hash 64 bits, as `sampler._splitmix64` does."""
    x = x + tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)
