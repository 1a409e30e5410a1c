r"""silu_and_mul: the gate of the MLP.

gate_up   [ gate ............ | up .............. ]
                 \                  /
product       [ silu(gate) * up ]                  one program for each BLOCK of a row
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Triton has no types, and types a kernel's arguments itself.

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from nanovllm.gpu.kernels.grid import ceil_div
from nanovllm.gpu.kernels.launch import (
    early_start,
    let_next_start,
    require_shape,
    wait_for_previous,
)

BLOCK = 1024


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (vLLM: silu_and_mul). The oracle is `SiluAndMul`.

    Args:
        gate_up: (num_tokens, 2 * intermediate_size), two halves side by side.

    Returns:
        (num_tokens, intermediate_size), as `gate_up` is.

    Raises:
        ValueError: a row has an odd number of columns, or the tensor is not contiguous.
    """
    require_shape((None, None), gate_up=gate_up)
    num_tokens, width = gate_up.shape
    if width % 2:
        raise ValueError(f"gate_up must be two halves side by side, but its rows have {width}.")
    size = width // 2
    product = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if product.numel():
        _silu_and_mul[(num_tokens, ceil_div(size, BLOCK))](
            gate_up, product, size, block=BLOCK, **early_start(gate_up.device)
        )
    return product


@triton.jit
def _silu_and_mul(gate_up, product, size, block: tl.constexpr, is_early: tl.constexpr):
    let_next_start(is_early)
    wait_for_previous(is_early)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_in = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=is_in)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=is_in)
    tl.store(product + row * size + columns, gated(gate.to(tl.float32), up), mask=is_in)


@triton.jit
def gated(gate, up):
    """silu(gate) * up. `gate` is float32. Rounds to the dtype of `up` after each, as the oracle."""
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(up.dtype)
