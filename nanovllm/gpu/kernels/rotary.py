"""qk_norm_rope_write: all that is between the qkv product and attention, in one kernel.

One program for each token. It reads the token's row as two tables of half heads, so that the two
numbers of a pair, which are rotated together, have the same place in both tables:

                       first half     second half
        q heads      [ x_0 x_1 ... | x_h x_(h+1) ... ]   norm, rotate ──> q
        k heads      [             |                 ]   norm, rotate ──> k_cache[slot]
        v heads      [             |                 ]                ──> v_cache[slot]

It rounds to the model's dtype where `RMSNorm` and `Rotation` do.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Triton has no types, and types a kernel's arguments itself.

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from nanovllm.gpu.kernels.grid import next_power_of_two
from nanovllm.gpu.kernels.launch import (
    early_start,
    let_next_start,
    require_same_dtype,
    require_shape,
    wait_for_previous,
)
from nanovllm.gpu.kernels.norm import inverse_root_mean_square, scale_normed


def qk_norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos_sin_table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    k_out: Tensor | None = None,
) -> Tensor:
    """Norm and rotate the queries and keys, and write the keys and values into their slots.

    The oracle is `RMSNorm`, `Rotation.apply` and `SdpaBackend.write_kv`, one after another. (vLLM
    has rotary_embedding and reshape_and_cache.)

    Args:
        qkv: (num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).
        q_weight: (head_dim,), the weight of the queries' norm.
        k_weight: (head_dim,), of the keys'.
        eps: added to both mean squares.
        cos_sin_table: (max_position, head_dim) float32, cosines, then sines.
        positions: (num_tokens,) int64, each below max_position.
        slot_mapping: (num_tokens,) int64; a token of slot -1 is padding and writes nothing.
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), written to.
        v_cache: the same, written to.
        num_heads: of the queries.
        num_kv_heads: of the keys, and of the values.
        k_out: (num_tokens, num_kv_heads, head_dim); if given, the keys are also written to it, for
            a prefill with nothing cached.

    Returns:
        The queries, (num_tokens, num_heads, head_dim), as `qkv` is.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    head_dim = q_weight.shape[-1]
    if head_dim < 2 or head_dim != next_power_of_two(head_dim):  # noqa: PLR2004 -- a pair
        raise ValueError(f"head_dim must be a power of two from 2 up, not {head_dim}.")
    require_shape((None, (num_heads + 2 * num_kv_heads) * head_dim), qkv=qkv)
    num_tokens = qkv.shape[0]
    require_shape((head_dim,), k_weight=k_weight)
    require_shape((None, head_dim), cos_sin_table=cos_sin_table)
    require_shape((num_tokens,), positions=positions, slot_mapping=slot_mapping)
    require_shape((None, None, num_kv_heads, head_dim), k_cache=k_cache)
    require_shape(tuple(k_cache.shape), v_cache=v_cache)
    require_same_dtype(
        qkv=qkv, q_weight=q_weight, k_weight=k_weight, k_cache=k_cache, v_cache=v_cache, k_out=k_out
    )
    if k_out is not None:
        require_shape((num_tokens, num_kv_heads, head_dim), k_out=k_out)
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        _qk_norm_rope_write[(num_tokens,)](
            *(qkv, q_weight, k_weight, cos_sin_table, positions, slot_mapping),
            *(q, k_cache, v_cache, k_out, eps),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            half=head_dim // 2,
            block_heads=next_power_of_two(num_heads + 2 * num_kv_heads),
            has_k_out=k_out is not None,
            num_warps=8,
            **early_start(qkv.device),
        )
    return q


@triton.jit
def _qk_norm_rope_write(
    qkv,
    q_weight,
    k_weight,
    cos_sin_table,
    positions,
    slot_mapping,
    q,
    k_cache,
    v_cache,
    k_out,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    half: tl.constexpr,
    block_heads: tl.constexpr,
    has_k_out: tl.constexpr,
    is_early: tl.constexpr,
):
    let_next_start(is_early)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, block_heads)[:, None]
    columns = tl.arange(0, half)[None, :]
    is_q = heads < num_heads
    is_k = (heads >= num_heads) & (heads < num_heads + num_kv_heads)
    is_v = (heads >= num_heads + num_kv_heads) & (heads < num_heads + 2 * num_kv_heads)
    # (block_heads, half): each head's weights
    weight_1 = tl.where(is_q, tl.load(q_weight + columns), tl.load(k_weight + columns))
    weight_2 = tl.where(
        is_q, tl.load(q_weight + half + columns), tl.load(k_weight + half + columns)
    )
    angle = cos_sin_table + tl.load(positions + token) * 2 * half + columns
    cos, sin = tl.load(angle), tl.load(angle + half)
    slot = tl.load(slot_mapping + token)
    is_real = slot >= 0
    wait_for_previous(is_early)

    offsets = heads * 2 * half + columns
    row = qkv + token * (num_heads + 2 * num_kv_heads) * 2 * half + offsets
    is_head = is_q | is_k | is_v
    x_1 = tl.load(row, mask=is_head, other=0.0)
    x_2 = tl.load(row + half, mask=is_head, other=0.0)

    wide_1, wide_2 = x_1.to(tl.float32), x_2.to(tl.float32)
    squares = tl.sum(wide_1 * wide_1 + wide_2 * wide_2, axis=1)[:, None]
    inverse = inverse_root_mean_square(squares, 2 * half, eps)
    normed_1 = scale_normed(wide_1 * inverse, weight_1).to(tl.float32)
    normed_2 = scale_normed(wide_2 * inverse, weight_2).to(tl.float32)
    turned_1 = (normed_1 * cos - normed_2 * sin).to(x_1.dtype)
    turned_2 = (normed_2 * cos + normed_1 * sin).to(x_1.dtype)

    out = q + token * num_heads * 2 * half + offsets
    tl.store(out, turned_1, mask=is_q)
    tl.store(out + half, turned_2, mask=is_q)
    k_offsets = offsets - num_heads * 2 * half
    out = k_cache + slot * num_kv_heads * 2 * half + k_offsets
    tl.store(out, turned_1, mask=is_k & is_real)
    tl.store(out + half, turned_2, mask=is_k & is_real)
    v_offsets = k_offsets - num_kv_heads * 2 * half
    out = v_cache + slot * num_kv_heads * 2 * half + v_offsets
    tl.store(out, x_1, mask=is_v & is_real)
    tl.store(out + half, x_2, mask=is_v & is_real)
    if has_k_out:
        out = k_out + token * num_kv_heads * 2 * half + k_offsets
        tl.store(out, turned_1, mask=is_k)
        tl.store(out + half, turned_2, mask=is_k)
