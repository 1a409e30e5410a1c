"""HybridBackend and FlashAttentionBackend: paged attention through the flash-attn package, on GPUs.

Knows which kind of step is whose. The package's calls are in `flash_attn_calls.py`; what is not
done with them is `TritonBackend`'s: K and V are written into the pages by this project's kernel.
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
    """Prefills by flash-attn, decodes by `kernels.paged_attention`: what "auto" takes on a GPU.

    flash-attn 2's decode starts slowly: at one sequence of 512 tokens it took four times as long
    (docs/performance-notes.md).
    """

    name = "hybrid"

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
    """Both by flash-attn."""

    name = "flash_attn"

    def decode(
        self, q: Tensor, *, k_cache: Tensor, v_cache: Tensor, scale: float, context: Context
    ) -> Tensor:
        """See AttentionBackend."""
        return self.calls.decode(q, k_cache, v_cache, scale, context)
