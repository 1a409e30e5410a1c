"""Attention: each token attends to the tokens before it, through the KV cache's blocks.

A layer's cache is two tensors of blocks; block b of every layer belongs to the same tokens:

        k_cache, v_cache    (num_blocks, block_size, num_kv_heads, head_dim)

                 slot 0   1   2   3   4   5   6   7   8   9  10  11       block_size 4
                     +---------------+---------------+---------------+
                     | a0  a1  a2  a3| b0  b1  b2    | a4  a5        | ...
                     +---------------+---------------+---------------+
                       block 0         block 1         block 2

        block table of sequence a: [0, 2]      of sequence b: [1]
        token t of a sequence lies in block  block_table[t // block_size],
                                  in slot    block * block_size + t % block_size

A step first writes the new keys and values, then attends; a backend does both. Which blocks belong
to which sequence is in the context (`context.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from nanovllm.layers.context import get_context

if TYPE_CHECKING:
    from nanovllm.layers.context import Context


class AttentionBackend(Protocol):
    """One way to compute paged attention. It has no state.

    What all layers of a step share, it may store in `context.plan`.
    """

    def write_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write (num_tokens, num_kv_heads, head_dim) keys and values into their slots."""
        ...

    def prefill(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, context: Context
    ) -> Tensor:
        """Causal attention of the new tokens of each sequence, any number, to its whole context.

        The new tokens are the last of the context. If `context.block_tables` is None, they are the
        whole context, and `keys` and `values` are theirs, (num_tokens, num_kv_heads, head_dim).
        Else `keys` and `values` are the cache; those of the new tokens are written there already.

        Returns:
            (num_tokens, num_heads, head_dim), as `q` is.
        """
        ...

    def decode(
        self, q: Tensor, *, k_cache: Tensor, v_cache: Tensor, scale: float, context: Context
    ) -> Tensor:
        """Attention of one new token of each sequence to its whole context, which is in the cache.

        Returns:
            (num_seqs, num_heads, head_dim), as `q` is.
        """
        ...


class Attention(nn.Module):
    """The attention of one layer, and its part of the KV cache.

    Attributes:
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), set by the model runner. Before
            that only a prefill with nothing cached can be computed.
        v_cache: the same.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, backend: AttentionBackend
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.backend = backend
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend.

        Args:
            q: (num_tokens, num_heads, head_dim).
            k: (num_tokens, num_kv_heads, head_dim).
            v: (num_tokens, num_kv_heads, head_dim).

        Returns:
            (num_tokens, num_heads, head_dim).
        """
        context = get_context()
        k_cache, v_cache = self.k_cache, self.v_cache
        if k_cache is not None and v_cache is not None:
            self.backend.write_kv(k, v, k_cache, v_cache, context.slot_mapping)
            if context.phase == "decode":
                return self.backend.decode(
                    q, k_cache=k_cache, v_cache=v_cache, scale=self.scale, context=context
                )
            if context.block_tables is not None:
                k, v = k_cache, v_cache  # the whole context; the new ones were written above
        elif context.phase == "decode" or context.block_tables is not None:
            raise RuntimeError(
                "This step reads the KV cache, but the layer has none: "
                "set k_cache and v_cache of every Attention first."
            )
        return self.backend.prefill(q, k, v, self.scale, context)
