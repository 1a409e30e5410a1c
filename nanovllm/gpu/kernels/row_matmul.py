"""multiply_row: one row times a large weight, which is loaded before the kernel waits.

With one row there is one multiplication for each number of the weight, so the time is that of
reading the weight. All programs must start their loads at once:

                              size
        weight     +--------------------------+
                   |         program 0        |  a few whole rows of the weight: their loads start
                   +--------------------------+  before the program waits for the previous kernel
                   |         program 1        |  (see `launch`), and go on while it waits
                   +--------------------------+
                   |            ...           |

A program has whole rows of the weight, so it has whole sums. It also does what comes before and
after them:

        norm       before: each program norms the row itself, while its part of the weight is loaded
        addition   after: of the residual stream
        gating     after: a program has the same rows of gate and up, and multiplies the two

`skinny_matmul` calls it.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Triton has no types, and types a kernel's arguments itself.

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from nanovllm.gpu.kernels.activation import gated
from nanovllm.gpu.kernels.grid import ceil_div, choose_row_tiling
from nanovllm.gpu.kernels.launch import early_start, let_next_start, wait_for_previous
from nanovllm.gpu.kernels.norm import add_rounded, inverse_root_mean_square, scale_normed

MAX_SIZE = 16384  # a row of the weight must fit in the registers of one program


def multiply_row(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    num_outputs: int,
) -> Tensor:
    """`skinny_matmul` for one row, without its checks: (1, size) -> (1, num_outputs)."""
    size = x.shape[1]
    out = torch.empty(1, num_outputs, dtype=x.dtype, device=x.device)
    is_gate_up = num_outputs < weight.shape[0]
    tiling = choose_row_tiling(size)
    _multiply_row[(ceil_div(num_outputs, tiling.block_outputs),)](
        *(x, weight, norm_weight, residual, out, eps),
        num_outputs=num_outputs,
        size=size,
        block_outputs=tiling.block_outputs,
        block_size=tiling.block_size,
        has_norm=norm_weight is not None,
        has_residual=residual is not None,
        is_gate_up=is_gate_up,
        num_warps=tiling.num_warps,
        **early_start(x.device),
    )
    return out


@triton.jit
def _multiply_row(
    x,
    weight,
    norm_weight,
    residual,
    out,
    eps,
    num_outputs: tl.constexpr,
    size: tl.constexpr,
    block_outputs: tl.constexpr,
    block_size: tl.constexpr,
    has_norm: tl.constexpr,
    has_residual: tl.constexpr,
    is_gate_up: tl.constexpr,
    is_early: tl.constexpr,
):
    let_next_start(is_early)
    outputs = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    columns = tl.arange(0, block_size)
    is_output, is_in = outputs < num_outputs, columns < size
    places = outputs.to(tl.int64)[:, None] * size + columns[None, :]
    is_weight = is_output[:, None] & is_in[None, :]
    tile = tl.load(weight + places, mask=is_weight, other=0.0)  # (block_outputs, block_size)
    if is_gate_up:
        up_tile = tl.load(weight + num_outputs * size + places, mask=is_weight, other=0.0)
    if has_norm:
        scales = tl.load(norm_weight + columns, mask=is_in, other=0.0)
    wait_for_previous(is_early)

    row = tl.load(x + columns, mask=is_in, other=0.0)
    if has_norm:
        wide = row.to(tl.float32)
        inverse = inverse_root_mean_square(tl.sum(wide * wide, axis=0), size, eps)
        row = scale_normed(wide * inverse, scales)
    factors = row.to(tl.float32)[None, :]
    product = tl.sum(tile.to(tl.float32) * factors, axis=1).to(row.dtype)
    if is_gate_up:
        up = tl.sum(up_tile.to(tl.float32) * factors, axis=1).to(row.dtype)
        product = gated(product.to(tl.float32), up)
    if has_residual:
        product = add_rounded(product, tl.load(residual + outputs, mask=is_output, other=0.0))
    tl.store(out + outputs, product, mask=is_output)
