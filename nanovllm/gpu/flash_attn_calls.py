"""The calls of the flash-attn package, version 2 or 3, as this engine makes them.

                                       version 2                    version 3 (Hopper)
    package                            flash_attn                   flash_attn_interface
    prefill, nothing cached            flash_attn_varlen_func       flash_attn_varlen_func
    prefill that reads the cache       flash_attn_varlen_func       flash_attn_with_kvcache
    decode                             flash_attn_with_kvcache      flash_attn_with_kvcache
    the block tables are called        block_table                  page_table

Both take sequences of different lengths, read K and V from blocks, and never write a score matrix
to memory. Nothing here copies a number from the GPU to the host, so a decode can be captured.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.layers.context import Context

HOPPER = (9, 0)  # the compute capability that flash-attn 3 is for


def flash_attn_version(capability: tuple[int, int]) -> Literal[2, 3] | None:
    """Which flash-attn is installed for a GPU: 3 on Hopper if it is installed, else 2, or None."""
    if capability >= HOPPER and find_spec("flash_attn_interface") is not None:
        return 3
    return None if find_spec("flash_attn") is None else 2


class FlashAttnCalls:
    """Attention by flash-attn.

    Args:
        version: of the package.
    """

    def __init__(self, version: Literal[2, 3]) -> None:
        package: Any = import_module("flash_attn" if version == 2 else "flash_attn_interface")  # noqa: PLR2004 - the version's number
        self._varlen = package.flash_attn_varlen_func
        self._with_kvcache = package.flash_attn_with_kvcache
        self._tables_name = "block_table" if version == 2 else "page_table"  # noqa: PLR2004 - the same
        self._varlen_takes_tables = version == 2  # noqa: PLR2004 - the same

    def prefill(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, context: Context
    ) -> Tensor:
        """Attention of all tokens of a step; with block tables, `keys`, `values` are the cache.

        Returns:
            (num_tokens, num_heads, head_dim), as `q` is.
        """
        options: dict[str, Any] = {
            "cu_seqlens_q": context.cu_seqlens_q,
            "max_seqlen_q": context.max_seqlen_q,
            "softmax_scale": scale,
            "causal": True,  # the new tokens are the last of the context: lower right corner
        }
        if context.block_tables is not None:
            options[self._tables_name] = context.block_tables
            if not self._varlen_takes_tables:
                lens = context.context_lens
                return _first(self._with_kvcache(q, keys, values, cache_seqlens=lens, **options))
        options |= {"cu_seqlens_k": context.cu_seqlens_k, "max_seqlen_k": context.max_seqlen_k}
        return _first(self._varlen(q, keys, values, **options))

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, context: Context
    ) -> Tensor:
        """Attention of one token of each sequence: (num_seqs, num_heads, head_dim), as `q` is."""
        options = {self._tables_name: context.block_tables}
        attended = self._with_kvcache(
            q.unsqueeze(1),  # (num_seqs, 1, num_heads, head_dim)
            k_cache,
            v_cache,
            cache_seqlens=context.context_lens,
            softmax_scale=scale,
            causal=True,
            **options,
        )
        return _first(attended).squeeze(1)


def _first(returned: Any) -> Tensor:  # noqa: ANN401 - some releases of version 3 return more
    attended: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return attended
