"""HybridBackend and FlashAttentionBackend: paged attention through the flash-attn package, on GPUs.

flash-attn reads K and V where they lie, page by page through the block tables, and never writes a
score matrix to memory. Both of its functions take sequences of different lengths:

    prefill   flash_attn_varlen_func     the step's tokens in one row, cut by cu_seqlens
    decode    flash_attn_with_kvcache    one token a sequence, cut by context_lens

Nothing here reads a number back from the GPU, so a decode can be captured into a CUDA graph.

Knows the package's two calls. What it does not do with them is `TritonBackend`'s: K and V are
written into the pages by this project's kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from nanovllm.layers.attention_triton import TritonBackend, keys_and_values

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.utils.context import Context


class HybridBackend(TritonBackend):
    """Prefills by flash-attn, decodes by `kernels.paged_attention`: what "auto" takes on a GPU.

    flash-attn's decode starts slowly: at one sequence of 512 tokens it took four times as long
    (docs/performance-notes.md).
    """

    name = "hybrid"

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
        keys, values = keys_and_values(k, v, k_cache, v_cache, context)
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


class FlashAttentionBackend(HybridBackend):
    """Both by flash-attn 2."""

    name = "flash_attn"

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
