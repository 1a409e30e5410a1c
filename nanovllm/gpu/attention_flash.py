"""HybridBackend and FlashAttentionBackend: paged attention through the flash-attn package, on GPUs.

The calls of the package are in `flash_attn_calls.py`. K and V are written into the blocks by this
project's kernel, as in `TritonBackend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.gpu.attention_triton import TritonBackend
from nanovllm.gpu.flash_attn_calls import FlashAttnCalls, flash_attn_version
from nanovllm.utils.devices import gpu_capability

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.layers.context import Context


class HybridBackend(TritonBackend):
    """Prefills by flash-attn, decodes by `kernels.paged_attention`: the first choice on a GPU.

    The decode of flash-attn 2 is slower: four times as slow with one sequence of 512 tokens
    (docs/performance-notes.md).
    """

    def __init__(self) -> None:
        version = flash_attn_version(gpu_capability("cuda"))
        if version is None:
            raise RuntimeError("flash-attn is not installed")
        self.calls = FlashAttnCalls(version)

    def prefill(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, context: Context
    ) -> Tensor:
        """See AttentionBackend."""
        return self.calls.prefill(q, keys, values, scale, context)


class FlashAttentionBackend(HybridBackend):
    """Prefills and decodes by flash-attn."""

    def decode(
        self, q: Tensor, *, k_cache: Tensor, v_cache: Tensor, scale: float, context: Context
    ) -> Tensor:
        """See AttentionBackend."""
        return self.calls.decode(q, k_cache, v_cache, scale, context)
