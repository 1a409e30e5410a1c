"""paged_attention: attention of one new token of each sequence to its whole context in the cache.

`attention_plan` divides the contexts into tiles and gives each worker an equal run of them. A
worker is one program for each KV head. The query heads that share a KV head are the rows of one
small matrix, so that each key and each value is read once:

        q      (rows, head_dim)        rows: num_heads / num_kv_heads, padded to 16
        tile   (block_tokens, head_dim)  gathered from the blocks by the block table
        keep   the largest score so far, the sum of weights, the weighted sum of values
               (Milakov and Gimelshein's online softmax)

If one worker has the whole sequence, that is the result. If several share it, each writes its
piece, the weighted mean and the logarithm of the sum of weights, and a second kernel combines them:

        worker 3   ... | sequence 7 |--\
        worker 4   |    sequence 7    |--+--> out[7]
        worker 5   | sequence 7 | ...  --/
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Triton has no types, and types a kernel's arguments itself.

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton import language as tl

from nanovllm.gpu.kernels.attention_plan import AttentionPlan, num_tiles_of, plan_attention
from nanovllm.gpu.kernels.grid import ceil_div, next_power_of_two, num_query_rows
from nanovllm.gpu.kernels.launch import (
    early_start,
    let_next_start,
    require_heads,
    require_same_dtype,
    require_shape,
    wait_for_previous,
)

PIECES_AT_ONCE = 16  # that are combined in one step
LOWEST = tl.constexpr(-1e30)  # instead of -infinity, whose differences are NaN


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Attention of one new token of each sequence, already in the cache, to its whole context.

    The oracle is `SdpaBackend.decode`. (vLLM: paged_attention_v2; flash-attn:
    flash_attn_with_kvcache.) Any block size is possible; a multiple of 32 is fastest.

    Args:
        q: (num_seqs, num_heads, head_dim).
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim).
        v_cache: the same.
        block_tables: (num_seqs, max_num_blocks) int32, each sequence's blocks in order.
        context_lens: (num_seqs,) int32; 0 for a padding row, whose result is zeros.
        scale: of the scores, before the softmax.
        plan: `plan_attention` of these `context_lens`; made here if None.

    Returns:
        (num_seqs, num_heads, head_dim), as `q` is.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    require_shape((None, None, None), q=q)
    num_seqs, num_heads, head_dim = q.shape
    require_shape((None, None, None, head_dim), k_cache=k_cache)
    require_shape(tuple(k_cache.shape), v_cache=v_cache)
    require_shape((num_seqs, None), block_tables=block_tables)
    require_shape((num_seqs,), context_lens=context_lens)
    require_same_dtype(q=q, k_cache=k_cache, v_cache=v_cache)
    block_size, num_kv_heads = k_cache.shape[1:3]
    require_heads(num_heads, num_kv_heads, head_dim)
    out = torch.empty_like(q)
    if not num_seqs:
        return out
    if plan is None:
        plan = plan_attention(context_lens, block_tables, k_cache, num_heads)
    require_shape((num_seqs,), **{"plan.seq_ends": plan.seq_ends})
    num_pieces = plan.num_workers + num_seqs
    means = torch.empty(num_pieces, num_heads, head_dim, dtype=torch.float32, device=q.device)
    log_sums = torch.empty(num_pieces, num_heads, dtype=torch.float32, device=q.device)
    group = num_heads // num_kv_heads
    _attend[(num_kv_heads, plan.num_workers)](
        *(q, k_cache, v_cache, block_tables, context_lens),
        *(plan.seq_ends, plan.runs, means, log_sums, out),
        scale / math.log(2),  # the kernel uses powers of 2 instead of e
        block_tables.shape[1],
        group=group,
        block_rows=num_query_rows(group),
        head_dim=head_dim,
        block_size=block_size,
        block_tokens=plan.tiling.block_tokens,
        num_empty_tiles=plan.tiling.num_empty_tiles,
        num_warps=plan.tiling.num_warps,
        num_stages=plan.tiling.num_stages,
        **early_start(q.device),
    )
    _combine[(num_heads, plan.num_workers)](
        *(context_lens, plan.shared, means, log_sums, out, num_seqs),
        head_dim=head_dim,
        block_rows=next_power_of_two(ceil_div(num_seqs, plan.num_workers)),
        block_pieces=PIECES_AT_ONCE,
        num_warps=1,
        **early_start(q.device),
    )
    return out


@triton.jit
def _attend(
    q,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    seq_ends,
    runs,
    means,
    log_sums,
    out,
    scale_log2,
    max_num_blocks,
    group: tl.constexpr,
    block_rows: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    block_tokens: tl.constexpr,
    num_empty_tiles: tl.constexpr,
    is_early: tl.constexpr,
):
    let_next_start(is_early)
    kv_head, num_kv_heads = tl.program_id(0), tl.num_programs(0)
    worker = tl.program_id(1)
    columns = tl.arange(0, head_dim)[None, :]
    rows = tl.arange(0, block_rows)
    is_row = rows < group
    wait_for_previous(is_early)

    run_begin, run_end = tl.load(runs + 4 * worker), tl.load(runs + 4 * worker + 1)
    first_seq, last_seq = tl.load(runs + 4 * worker + 2), tl.load(runs + 4 * worker + 3)
    for seq in range(first_seq.to(tl.int64), last_seq.to(tl.int64) + 1):
        context_len, seq_end = tl.load(context_lens + seq), tl.load(seq_ends + seq)
        seq_begin = seq_end - num_tiles_of(context_len, block_tokens, num_empty_tiles)
        begin, end = tl.maximum(run_begin, seq_begin), tl.minimum(run_end, seq_end)
        heads = kv_head * group + rows
        places = (seq * num_kv_heads * group + heads)[:, None] * head_dim + columns
        queries = tl.load(q + places, mask=is_row[:, None], other=0.0)
        values_sum, total, largest = _attend_to(
            queries,
            k_cache,
            v_cache,
            block_tables + seq * max_num_blocks,
            (begin - seq_begin) * block_tokens,
            tl.minimum((end - seq_begin) * block_tokens, context_len),
            kv_head,
            num_kv_heads,
            scale_log2,
            head_dim,
            block_size,
            block_tokens,
        )
        mean = values_sum / tl.where(total > 0.0, total, 1.0)[:, None]
        is_mine = is_row & (begin < end)
        if (begin == seq_begin) & (end == seq_end):
            tl.store(out + places, mean.to(out.dtype.element_ty), mask=is_mine[:, None])
        else:
            piece = (worker + seq) * num_kv_heads * group + heads
            tl.store(means + piece[:, None] * head_dim + columns, mean, mask=is_mine[:, None])
            tl.store(log_sums + piece, largest + tl.log2(total), mask=is_mine)


@triton.jit
def _attend_to(
    queries,
    k_cache,
    v_cache,
    table,
    begin,
    end,
    kv_head,
    num_kv_heads,
    scale_log2,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    block_tokens: tl.constexpr,
):
    """Attend to the tokens from `begin` to `end` of one sequence."""
    columns = tl.arange(0, head_dim)[None, :]
    largest = tl.full((queries.shape[0],), -float("inf"), dtype=tl.float32)
    total = tl.zeros((queries.shape[0],), dtype=tl.float32)
    values_sum = tl.zeros((queries.shape[0], head_dim), dtype=tl.float32)
    for first in range(begin, end, block_tokens):
        tokens = first + tl.arange(0, block_tokens)
        is_in = tokens < end
        if block_size % block_tokens == 0:  # the whole tile is in one block
            block_id = tl.load(table + first // block_size).to(tl.int64)
            slots = block_id * block_size + first % block_size + tl.arange(0, block_tokens)
        else:
            block_ids = tl.load(table + tokens // block_size, mask=is_in, other=0).to(tl.int64)
            slots = block_ids * block_size + tokens % block_size
        places = (slots * num_kv_heads + kv_head)[:, None] * head_dim + columns
        keys = tl.load(k_cache + places, mask=is_in[:, None], other=0.0)
        # One row a query, one column a token, as powers of 2.
        scores = tl.dot(queries, keys.T, input_precision="ieee") * scale_log2
        scores = tl.where(is_in[None, :], scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        shrink = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        values = tl.load(v_cache + places, mask=is_in[:, None], other=0.0)
        values_sum = tl.dot(
            weights.to(values.dtype), values, values_sum * shrink[:, None], input_precision="ieee"
        )
        largest = new_largest
    return values_sum, total, largest


@triton.jit
def _combine(
    context_lens,
    shared,
    means,
    log_sums,
    out,
    num_seqs,
    head_dim: tl.constexpr,
    block_rows: tl.constexpr,
    block_pieces: tl.constexpr,
    is_early: tl.constexpr,
):
    """Combine all pieces of the sequence that this worker begins and others continue."""
    let_next_start(is_early)
    head, num_heads = tl.program_id(0), tl.num_programs(0)
    worker, num_workers = tl.program_id(1), tl.num_programs(1)
    columns = tl.arange(0, head_dim)
    wait_for_previous(is_early)

    seq, num_pieces = tl.load(shared + 2 * worker), tl.load(shared + 2 * worker + 1)
    rows = worker + tl.arange(0, block_rows) * num_workers
    is_padding = tl.load(context_lens + rows, mask=rows < num_seqs, other=1) == 0
    places = (rows.to(tl.int64) * num_heads + head)[:, None] * head_dim + columns[None, :]
    nothing = tl.zeros((block_rows, head_dim), dtype=out.dtype.element_ty)
    tl.store(out + places, nothing, mask=is_padding[:, None])  # padding is in no worker's run

    if num_pieces > 0:
        largest = tl.full((), LOWEST, dtype=tl.float32)
        total = tl.zeros((), dtype=tl.float32)
        mixed = tl.zeros((head_dim,), dtype=tl.float32)
        for begin in range(0, num_pieces, block_pieces):
            pieces = begin + tl.arange(0, block_pieces)
            is_in = pieces < num_pieces
            heads = (worker + seq + pieces).to(tl.int64) * num_heads + head
            log_sum = tl.load(log_sums + heads, mask=is_in, other=-float("inf"))
            mean = tl.load(
                means + heads[:, None] * head_dim + columns[None, :], mask=is_in[:, None], other=0.0
            )
            new_largest = tl.maximum(largest, tl.max(log_sum, axis=0))
            shrink = tl.exp2(largest - new_largest)
            weights = tl.exp2(log_sum - new_largest)
            total = total * shrink + tl.sum(weights, axis=0)
            mixed = mixed * shrink + tl.sum(mean * weights[:, None], axis=0)
            largest = new_largest
        place = out + (seq.to(tl.int64) * num_heads + head) * head_dim + columns
        tl.store(place, (mixed / total).to(out.dtype.element_ty))
