"""SdpaBackend: paged attention through torch's scaled_dot_product_attention, on any device.

torch's attention needs keys and values in one tensor, so first the blocks are gathered:

        block table [0, 2], context of 6, block size 4
        slots        0   1   2   3   8   9           index_select gathers the context,
        gathered    [a0  a1  a2  a3  a4  a5]         of K and of V

The slots, and the keys that a query may attend to, are the same in every layer: the first layer
computes them and stores them in `context.plan` for the others.

This is the simple backend; the faster ones are tested against it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.layers.context import Context


class SdpaBackend:
    """Attention on any device of torch."""

    def write_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write (num_tokens, num_kv_heads, head_dim) keys and values into their slots."""
        _as_slots(k_cache).index_copy_(0, slot_mapping, k)
        _as_slots(v_cache).index_copy_(0, slot_mapping, v)

    def prefill(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, context: Context
    ) -> Tensor:
        """Attend one sequence after another, each to its own context."""
        if context.plan is None:
            context.plan = _plan_prefill(context, keys.shape[1])
        output = torch.empty_like(q)
        for rows, slots, mask in context.plan:
            if slots is None:
                k, v = keys[rows], values[rows]
            else:
                k = _as_slots(keys).index_select(0, slots)
                v = _as_slots(values).index_select(0, slots)
            output[rows] = scaled_dot_product_attention(
                q[rows].transpose(0, 1).unsqueeze(0),  # (1, num_heads, num_new, head_dim)
                k.transpose(0, 1).unsqueeze(0),  # (1, num_kv_heads, context_len, head_dim)
                v.transpose(0, 1).unsqueeze(0),
                attn_mask=mask,
                is_causal=len(k) == rows.stop - rows.start,  # nothing was cached
                scale=scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return output

    def decode(
        self, q: Tensor, *, k_cache: Tensor, v_cache: Tensor, scale: float, context: Context
    ) -> Tensor:
        """Attend all sequences at once, through one gather of all contexts."""
        if context.plan is None:
            context.plan = _plan_decode(context, k_cache.shape[1], q.dtype)
        slots, mask = context.plan
        gathered = (q.shape[0], context.max_seqlen_k, *k_cache.shape[2:])
        keys = _as_slots(k_cache).index_select(0, slots).view(gathered)
        values = _as_slots(v_cache).index_select(0, slots).view(gathered)
        output = scaled_dot_product_attention(
            q.unsqueeze(2),  # (num_seqs, num_heads, 1, head_dim)
            keys.transpose(1, 2),  # (num_seqs, num_kv_heads, max_context_len, head_dim)
            values.transpose(1, 2),
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        return output.squeeze(2)


def _as_slots(cache: Tensor) -> Tensor:
    """(num_blocks, block_size, ...) -> (num_slots, ...), the same memory."""
    return cache.view(-1, *cache.shape[2:])


def _slots(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Return the slots of the tokens at `positions`, both (num_seqs, num_positions)."""
    blocks = block_tables.long().gather(1, positions // block_size)
    return blocks * block_size + positions % block_size


def _plan_prefill(
    context: Context, block_size: int
) -> list[tuple[slice, Tensor | None, Tensor | None]]:
    """Plan each sequence of a prefill.

    Returns:
        For each sequence:
        the rows of its new tokens;
        the slots of its context, (context_len,) int64, or None if no sequence has anything cached;
        the mask, (num_new, context_len) bool, True where a query attends to a key, or None if none
        is needed: nothing is cached (plain causal), or there is one query, which attends to all.
    """
    plan = []
    device = context.cu_seqlens_q.device
    context_lens = context.cu_seqlens_k.diff().tolist()
    for seq, (begin, end) in enumerate(pairwise(context.cu_seqlens_q.tolist())):
        num_new, context_len = end - begin, context_lens[seq]
        slots = mask = None
        if context.block_tables is not None:
            positions = torch.arange(context_len, device=device).unsqueeze(0)
            slots = _slots(context.block_tables[seq : seq + 1], positions, block_size)[0]
            if 1 < num_new < context_len:
                mask = torch.ones(num_new, context_len, dtype=torch.bool, device=device)
                # The new tokens are the last: the diagonal ends at the lower right.
                mask = mask.tril(diagonal=context_len - num_new)
        plan.append((slice(begin, end), slots, mask))
    return plan


def _plan_decode(
    context: Context, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Plan all sequences of a decode at once, padded to the longest context.

    Returns:
        The slots of all contexts, one after another, (num_seqs * max_context_len,) int64. A shorter
        context is padded with its last slot, because memory that was never written may hold NaN,
        and a masked NaN still makes the sum NaN.
        The mask, (num_seqs, 1, 1, max_context_len), 0 within the context and -inf past it; None if
        all contexts have the same length.
    """
    if context.block_tables is None:
        raise RuntimeError("A decode step reads the KV cache: its context needs block_tables.")
    context_lens = context.context_lens.long().unsqueeze(1)  # (num_seqs, 1)
    positions = torch.arange(context.max_seqlen_k, device=context_lens.device)
    is_past_end = positions >= context_lens  # (num_seqs, max_context_len)
    slots = _slots(context.block_tables, positions.minimum(context_lens - 1), block_size)
    mask = None
    if is_past_end.any():
        mask = torch.zeros(is_past_end.shape, dtype=dtype, device=is_past_end.device)
        mask = mask.masked_fill_(is_past_end, -torch.inf)[:, None, None, :]
    return slots.flatten(), mask
