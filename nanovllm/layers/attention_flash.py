"""FlashAttentionBackend: paged attention through the flash-attn package, on GPUs.

flash-attn reads K and V where they lie, page by page through the block tables, and never writes a
score matrix to memory. Both of its functions take sequences of different lengths:

    prefill   flash_attn_varlen_func     the step's tokens in one row, cut by cu_seqlens
    decode    flash_attn_with_kvcache    one token a sequence, cut by context_lens

Nothing here reads a number back from the GPU, so a decode can be captured into a CUDA graph.

Knows the package's two calls. Does not know how pages are managed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from nanovllm.layers.attention_triton import TritonBackend
from nanovllm.layers.kernels.kv_write import write_kv

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.utils.context import Context


class FlashAttentionBackend:
    """Attention by flash-attn 2."""

    name = "flash_attn"

    def write_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """See AttentionBackend; a slot of -1 is padding and is not written."""
        write_kv(k, v, k_cache, v_cache, slot_mapping)

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        k_cache: Tensor | None,
        v_cache: Tensor | None,
        scale: float,
        context: Context,
    ) -> Tensor:
        """See AttentionBackend. With block tables, K and V are read from the pages."""
        keys, values = k, v
        if context.block_tables is not None:
            if k_cache is None or v_cache is None:
                raise RuntimeError("a prefill with a cached context needs the KV cache")
            keys, values = k_cache, v_cache
        attended: Tensor = flash_attn_varlen_func(
            q,
            keys,
            values,
            cu_seqlens_q=context.cu_seqlens_q,
            cu_seqlens_k=context.cu_seqlens_k,
            max_seqlen_q=context.max_seqlen_q,
            max_seqlen_k=context.max_seqlen_k,
            softmax_scale=scale,
            causal=True,  # the new tokens are the last of the context: lower right corner
            block_table=context.block_tables,
        )
        return attended

    def decode(
        self, q: Tensor, *, k_cache: Tensor, v_cache: Tensor, scale: float, context: Context
    ) -> Tensor:
        """See AttentionBackend."""
        attended: Tensor = flash_attn_with_kvcache(
            q.unsqueeze(1),  # (num_seqs, 1, num_heads, head_dim)
            k_cache,
            v_cache,
            cache_seqlens=context.context_lens,
            block_table=context.block_tables,
            softmax_scale=scale,
            causal=True,
        )
        return attended.squeeze(1)


class HybridBackend(FlashAttentionBackend):
    """Prefills by flash-attn, decodes by `kernels.paged_attention`: what "auto" takes on a GPU.

    flash-attn's decode starts slowly: at one sequence of 512 tokens it takes four times as long
    (docs/performance-notes.md).
    """

    name = "hybrid"

    def decode(
        self, q: Tensor, *, k_cache: Tensor, v_cache: Tensor, scale: float, context: Context
    ) -> Tensor:
        """See AttentionBackend."""
        return TritonBackend().decode(
            q, k_cache=k_cache, v_cache=v_cache, scale=scale, context=context
        )
