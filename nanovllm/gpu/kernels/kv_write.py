"""write_kv: writes the keys and values of a step's new tokens into their slots of the cache.

One program for each token copies a row of K and a row of V. (In a fused step, `rotary` does this.)
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Triton has no types, and types a kernel's arguments itself.

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from triton import language as tl

from nanovllm.gpu.kernels.grid import next_power_of_two
from nanovllm.gpu.kernels.launch import require_same_dtype, require_shape

if TYPE_CHECKING:
    from torch import Tensor


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values into their slots. The oracle is `SdpaBackend.write_kv`.

    Args:
        k: (num_tokens, num_kv_heads, head_dim); the heads of a token contiguous in memory.
        v: the same.
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), written to.
        v_cache: the same, written to.
        slot_mapping: (num_tokens,) int64; a token of slot -1 is padding and writes nothing.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    require_shape((num_tokens,), slot_mapping=slot_mapping)
    require_shape((None, None, num_kv_heads, head_dim), k_cache=k_cache)
    require_shape(tuple(k_cache.shape), v_cache=v_cache)
    require_same_dtype(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != k.shape or tensor.stride()[1:] != (head_dim, 1):
            raise ValueError(f"{name} must be rows of heads side by side, of the shape of k.")
    if num_tokens:
        size = num_kv_heads * head_dim
        _write_kv[(num_tokens,)](
            *(k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0)),
            size=size,
            block=next_power_of_two(size),
        )


@triton.jit
def _write_kv(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_stride,
    v_stride,
    size: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    columns = tl.arange(0, block)
    is_written = (columns < size) & (slot >= 0)
    key = tl.load(k + token * k_stride + columns, mask=is_written, other=0.0)
    value = tl.load(v + token * v_stride + columns, mask=is_written, other=0.0)
    tl.store(k_cache + slot * size + columns, key, mask=is_written)
    tl.store(v_cache + slot * size + columns, value, mask=is_written)
