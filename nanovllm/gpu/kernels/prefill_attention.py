"""prefill_attention: causal attention of the new tokens of each sequence to its whole context.

        new tokens are the last of the context             one program: one head, one block of rows
                    k0 k1 k2 k3 k4 k5 k6
              q4  [  x  x  x  x  x  .  .  ]                 its loop goes over the tiles of keys
              q5  [  x  x  x  x  x  x  .  ]                 from the left, up to the last key that
              q6  [  x  x  x  x  x  x  x  ]                 its last row attends to

Keys and values are read from one tensor, or, if something is cached, from the blocks.

With 64 rows and 64 keys per step it is about as fast as flash-attn 2 on Hopper. (The steps are
smaller if these do not fit, with large heads or on a small GPU.)
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Triton has no types, and types a kernel's arguments itself.

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton import language as tl

from nanovllm.gpu.kernels.grid import ceil_div, choose_prefill_tiling
from nanovllm.gpu.kernels.launch import (
    early_start,
    let_next_start,
    require_heads,
    require_same_dtype,
    require_shape,
    shared_memory_bytes,
    wait_for_previous,
)

NUM_WARPS = 4


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    scale: float,
    block_tables: Tensor | None = None,
) -> Tensor:
    """Causal attention of the new tokens of each sequence, any number, to its whole context.

    The oracle is `SdpaBackend.prefill`. (vLLM and flash-attn: flash_attn_varlen_func.)

    Args:
        q: (num_tokens, num_heads, head_dim).
        k: without `block_tables` (num_context_tokens, num_kv_heads, head_dim), all contexts one
            after another; with them the cache, (num_blocks, block_size, num_kv_heads, head_dim).
            Without `block_tables`, only the heads of a token must be contiguous: a view of the qkv
            product is possible.
        v: the same.
        cu_seqlens_q: (num_seqs + 1,) int32, cumulative numbers of new tokens.
        cu_seqlens_k: (num_seqs + 1,) int32, cumulative context lengths.
        max_seqlen_q: the most new tokens of one sequence.
        scale: of the scores, before the softmax.
        block_tables: (num_seqs, max_num_blocks) int32, or None.

    Returns:
        (num_tokens, num_heads, head_dim), as `q` is.

    Raises:
        ValueError: a shape, a stride or a dtype does not fit.
    """
    require_shape((None, None, None), q=q)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[-2]
    require_heads(num_heads, num_kv_heads, head_dim)
    require_same_dtype(q=q, k=k, v=v)
    num_seqs = cu_seqlens_q.shape[0] - 1
    require_shape((num_seqs + 1,), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if block_tables is not None:
        require_shape((num_seqs, None), block_tables=block_tables)
    _require_keys("k", k, num_kv_heads, head_dim, has_tables=block_tables is not None)
    _require_keys("v", v, num_kv_heads, head_dim, has_tables=block_tables is not None)
    out = torch.empty_like(q)
    if num_tokens:
        tiling = choose_prefill_tiling(head_dim * q.element_size(), shared_memory_bytes(q.device))
        _attend_causally[(ceil_div(max_seqlen_q, tiling.block_rows), num_heads, num_seqs)](
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            block_tables,
            out,
            scale / math.log(2),  # the kernel uses powers of 2 instead of e
            0 if block_tables is None else block_tables.shape[1],
            k.stride(-3),
            v.stride(-3),
            num_heads=num_heads,
            group=num_heads // num_kv_heads,
            head_dim=head_dim,
            block_size=1 if block_tables is None else k.shape[1],
            has_tables=block_tables is not None,
            block_rows=tiling.block_rows,
            block_tokens=tiling.block_tokens,
            num_warps=NUM_WARPS,
            num_stages=tiling.num_stages,
            **early_start(q.device),
        )
    return out


def _require_keys(
    name: str, keys: Tensor, num_kv_heads: int, head_dim: int, *, has_tables: bool
) -> None:
    """Check shape and strides of keys or values: contiguous heads, and a contiguous cache."""
    if keys.shape[-2:] != (num_kv_heads, head_dim) or keys.dim() != (4 if has_tables else 3):
        rows = "(num_blocks, block_size" if has_tables else "(num_context_tokens"
        raise ValueError(
            f"{name} must have the shape {rows}, {num_kv_heads}, {head_dim}), "
            f"not {tuple(keys.shape)}."
        )
    if keys.stride()[-2:] != (head_dim, 1) or (has_tables and not keys.is_contiguous()):
        raise ValueError(f"{name} must be contiguous, not of the strides {keys.stride()}.")


@triton.jit
def _attend_causally(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    block_tables,
    out,
    scale_log2,
    max_num_blocks,
    k_stride,
    v_stride,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    has_tables: tl.constexpr,
    block_rows: tl.constexpr,
    block_tokens: tl.constexpr,
    is_early: tl.constexpr,
):
    let_next_start(is_early)
    wait_for_previous(is_early)
    head = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    begin_q, begin_k = tl.load(cu_seqlens_q + seq), tl.load(cu_seqlens_k + seq)
    num_new = tl.load(cu_seqlens_q + seq + 1) - begin_q
    context_len = tl.load(cu_seqlens_k + seq + 1) - begin_k
    first_row = tl.program_id(0) * block_rows
    rows = first_row + tl.arange(0, block_rows)
    is_row = rows < num_new
    columns = tl.arange(0, head_dim)[None, :]
    places = ((begin_q + rows).to(tl.int64) * num_heads + head)[:, None] * head_dim + columns
    queries = tl.load(q + places, mask=is_row[:, None], other=0.0)
    positions = context_len - num_new + rows  # of the rows' tokens in their sequence
    largest = tl.full((block_rows,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((block_rows,), dtype=tl.float32)
    values_sum = tl.zeros((block_rows, head_dim), dtype=tl.float32)
    end = tl.minimum(context_len - num_new + first_row + block_rows, context_len)
    end = tl.where(first_row < num_new, end, 0)  # this sequence has fewer rows than the longest
    for first in range(0, end, block_tokens):
        tokens = first + tl.arange(0, block_tokens)
        is_in = tokens < context_len
        if has_tables:
            table = block_tables + seq * max_num_blocks
            block_ids = tl.load(table + tokens // block_size, mask=is_in, other=0).to(tl.int64)
            slots = block_ids * block_size + tokens % block_size
        else:
            slots = (begin_k + tokens).to(tl.int64)
        offsets = (head // group) * head_dim + columns
        keys = tl.load(k + slots[:, None] * k_stride + offsets, mask=is_in[:, None], other=0.0)
        scores = (
            tl.dot(queries, keys.T, input_precision="ieee") * scale_log2
        )  # (block_rows, block_tokens)
        scores = tl.where(tokens[None, :] <= positions[:, None], scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        shrink = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        values = tl.load(v + slots[:, None] * v_stride + offsets, mask=is_in[:, None], other=0.0)
        values_sum = tl.dot(
            weights.to(values.dtype), values, values_sum * shrink[:, None], input_precision="ieee"
        )
        largest = new_largest
    mean = (values_sum / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + places, mean, mask=is_row[:, None])
