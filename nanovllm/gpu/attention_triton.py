"""TritonBackend: paged attention with this project's own kernels, on GPUs.

It runs where flash-attn does not: on a T4, or with an unusual block size or head size. To learn how
paged attention works, read `gpu/kernels/paged_attention.py` and `prefill_attention.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.gpu.kernels.attention_plan import AttentionPlan, plan_attention
from nanovllm.gpu.kernels.kv_write import write_kv
from nanovllm.gpu.kernels.paged_attention import paged_attention
from nanovllm.gpu.kernels.prefill_attention import prefill_attention

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.layers.context import Context


class TritonBackend:
    """Attention by the kernels of `gpu/kernels`."""

    def write_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """See AttentionBackend; a slot of -1 is padding and is not written."""
        write_kv(k, v, k_cache, v_cache, slot_mapping)

    def prefill(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, context: Context
    ) -> Tensor:
        """See AttentionBackend."""
        return prefill_attention(
            *(q, keys, values, context.cu_seqlens_q, context.cu_seqlens_k),
            *(context.max_seqlen_q, scale, context.block_tables),
        )

    def decode(
        self, q: Tensor, *, k_cache: Tensor, v_cache: Tensor, scale: float, context: Context
    ) -> Tensor:
        """See AttentionBackend."""
        if context.block_tables is None:
            raise RuntimeError("a decode step reads the KV cache: its context needs block_tables")
        lens, tables = context.context_lens, context.block_tables
        if not isinstance(context.plan, AttentionPlan):  # in the first layer
            context.plan = plan_attention(lens, tables, k_cache, q.shape[1])
        return paged_attention(q, k_cache, v_cache, tables, lens, scale, context.plan)
