"""plan_attention: divides the contexts of a decode step, so that all programs end together.

Contexts have different lengths. With one program for each, all would wait for the longest. So the
tiles of all contexts are put in one row, and every worker gets an equal run of them, across
sequences. (The idea is from Stream-K, for matrix products: Osama et al., 2023.) A worker that
begins another sequence needs as much time for that as for two small tiles. So if tiles are small,
two empty ones are added after each sequence (not shown here).

        sequences        0             1                     2     3 (padding)
        tiles        | 0  1  2 | 3  4  5  6  7  8  9 10 | 11 12 |
        seq_ends             3                       11      13   13

        5 workers    [ 0  1 | 2  3  4 | 5  6 | 7  8  9 | 10 11 12 ]
        runs           0 2     2 5     5 7    7 10      10 13      begin and end,
                       0 0     0 1     1 1     1 1       1 2       first and last sequence
        shared         0 2     1 4      -       -         -        sequence and number of pieces

Worker 4 has a piece of sequence 1, and all of sequence 2. Worker 0 is the first of two that share
sequence 0, worker 1 the first of four that share sequence 1.

A worker is one program for each KV head; all of them read the same blocks. Its piece of a sequence
has the number `worker + seq`: from one piece to the next at least one of the two grows, so no two
pieces have the same number, and the pieces of one sequence are consecutive.

All layers of a step use the same plan. It is computed on the device, because the lengths of the
contexts are not known when a graph is captured. `paged_attention` uses the plan.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Triton has no types, and types a kernel's arguments itself.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import language as tl

from nanovllm.gpu.kernels.grid import (
    AttentionTiling,
    choose_attention_tiling,
    choose_workers,
    next_power_of_two,
    num_query_rows,
)
from nanovllm.gpu.kernels.launch import (
    early_start,
    let_next_start,
    num_multiprocessors,
    require_heads,
    require_shape,
    shared_memory_bytes,
    wait_for_previous,
)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The pieces of a step's contexts, on the device.

    Attributes:
        tiling: its `block_tokens` are a tile.
        num_workers: that share the tiles.
        seq_ends: (num_seqs,) int32, the tile after each sequence's last, including empty ones.
        runs: (num_workers, 4) int32, each worker's first tile, the tile after its last, the
            sequence of the first, and the sequence of the last.
        shared: (num_workers, 2) int32, the sequence that a worker begins and others continue, and
            the number of its pieces: 0 if there is no such sequence.
    """

    tiling: AttentionTiling
    num_workers: int
    seq_ends: Tensor
    runs: Tensor
    shared: Tensor


def plan_attention(
    context_lens: Tensor, block_tables: Tensor, k_cache: Tensor, num_heads: int
) -> AttentionPlan:
    """Divide a step's contexts among workers (flash-attn 3: get_scheduler_metadata).

    Args:
        context_lens: (num_seqs,) int32, num_seqs > 0; 0 for a padding row.
        block_tables: (num_seqs, max_num_blocks), for its size.
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), of any layer, for its size.
        num_heads: of the queries.

    Raises:
        ValueError: a shape or the number of heads does not fit, or a size is 0.
    """
    require_shape((None,), context_lens=context_lens)
    num_seqs, device = context_lens.shape[0], context_lens.device
    require_shape((num_seqs, None), block_tables=block_tables)
    require_shape((None, None, None, None), k_cache=k_cache)
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    require_heads(num_heads, num_kv_heads, head_dim)
    max_context = block_tables.shape[1] * block_size
    multiprocessors = num_multiprocessors(device)
    tiling = choose_attention_tiling(
        *(num_seqs * num_kv_heads, num_query_rows(num_heads // num_kv_heads)),
        *(head_dim * k_cache.element_size(), multiprocessors, shared_memory_bytes(device)),
    )
    num_workers = choose_workers(num_seqs, num_kv_heads, max_context, tiling, multiprocessors)
    seq_ends = torch.empty(num_seqs, dtype=torch.int32, device=device)
    runs = torch.empty(num_workers, 4, dtype=torch.int32, device=device)
    shared = torch.empty(num_workers, 2, dtype=torch.int32, device=device)
    _plan[(num_workers,)](
        *(context_lens, seq_ends, runs, shared, num_seqs),
        block_seqs=next_power_of_two(num_seqs),
        block_tokens=tiling.block_tokens,
        num_empty_tiles=tiling.num_empty_tiles,
        **early_start(device),
    )
    return AttentionPlan(tiling, num_workers, seq_ends, runs, shared)


@triton.jit
def _plan(
    context_lens,
    seq_ends,
    runs,
    shared,
    num_seqs,
    block_seqs: tl.constexpr,
    block_tokens: tl.constexpr,
    num_empty_tiles: tl.constexpr,
    is_early: tl.constexpr,
):
    """One program for each worker; each of them adds up all the lengths."""
    let_next_start(is_early)
    wait_for_previous(is_early)
    worker, num_workers = tl.program_id(0), tl.num_programs(0)
    seqs = tl.arange(0, block_seqs)
    is_seq = seqs < num_seqs
    context_len = tl.load(context_lens + seqs, mask=is_seq, other=0)
    num_tiles = num_tiles_of(context_len, block_tokens, num_empty_tiles)
    ends = tl.cumsum(num_tiles, axis=0)
    num_all = tl.sum(num_tiles, axis=0)
    begin = _first_tile(worker, num_all, num_workers)
    end = _first_tile(worker + 1, num_all, num_workers)
    # A tile belongs to the first sequence that ends after it.
    first_seq = tl.sum((is_seq & (ends <= begin)).to(tl.int32), axis=0)
    last_seq = tl.sum((is_seq & (ends < end)).to(tl.int32), axis=0)
    run = runs + 4 * worker
    tl.store(run, begin)
    tl.store(run + 1, end)
    tl.store(run + 2, first_seq)
    tl.store(run + 3, last_seq)

    last_seq_end = tl.sum(tl.where(seqs == last_seq, ends, 0), axis=0)
    last_seq_begin = last_seq_end - tl.sum(tl.where(seqs == last_seq, num_tiles, 0), axis=0)
    is_shared = (begin <= last_seq_begin) & (last_seq_begin < end) & (end < last_seq_end)
    num_pieces = _worker_of(last_seq_end - 1, num_all, num_workers) - worker + 1
    tl.store(shared + 2 * worker, last_seq)
    tl.store(shared + 2 * worker + 1, tl.where(is_shared, num_pieces, 0))
    if worker == 0:
        tl.store(seq_ends + seqs, ends, mask=is_seq)


@triton.jit
def num_tiles_of(context_len, block_tokens: tl.constexpr, num_empty_tiles: tl.constexpr):
    """Return the number of tiles of a context; 0 for padding."""
    num_tiles = tl.cdiv(context_len, block_tokens)
    return tl.where(num_tiles > 0, num_tiles + num_empty_tiles, 0)


@triton.jit
def _first_tile(worker, num_tiles, num_workers):
    """Return the first tile of a worker's run. The lengths of runs differ by at most one tile.

    If there are fewer tiles than workers, the last workers have none.
    """
    num_busy = tl.maximum(tl.minimum(num_workers, num_tiles), 1)
    return (tl.minimum(worker, num_busy).to(tl.int64) * num_tiles // num_busy).to(tl.int32)


@triton.jit
def _worker_of(tile, num_tiles, num_workers):
    """Return the worker whose run contains a tile: the last that begins at or before it."""
    num_busy = tl.minimum(num_workers, num_tiles)
    return (((tile + 1).to(tl.int64) * num_busy - 1) // tl.maximum(num_tiles, 1)).to(tl.int32)
