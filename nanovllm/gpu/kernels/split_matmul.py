"""split_matmul: 17 to 256 rows times a weight, whose columns are split among programs.

With 17 to 256 rows both reading and arithmetic take time: a program computes a tile of the output,
and reads each number once for the whole tile. The last products of attention and of the MLP have
few outputs and so few tiles, which leave half of the GPU without work. So their columns are split
into parts as well, one program for each:

                        size                                        size
                 part 0     part 1     part 2                part 0     part 1     part 2
               +----------+----------+----------+          +----------+----------+----------+
        x      |          | program  |          |  weight  |          | program  |          |
               +----------+----------+----------+          +----------+----------+----------+
               |          |          |          |          |          |          |          |
            num_rows                             num_outputs

The sums of the parts are stored separately, in float32: `add_rms_norm`, the next kernel, adds them
up. cuBLAS splits such products too, but adds up the parts in a separate kernel, and as measured
none of its kernels starts before the previous one has ended (see `launch`).
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Triton has no types, and types a kernel's arguments itself.

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from nanovllm.gpu.kernels.grid import SplitTiling, ceil_div
from nanovllm.gpu.kernels.launch import (
    early_start,
    let_next_start,
    require_same_dtype,
    require_shape,
    wait_for_previous,
)


def split_matmul(x: Tensor, weight: Tensor, tiling: SplitTiling) -> Tensor:
    """Compute x @ weight.T, in parts that must be added up.

    The oracle is `functional.linear`. The product is summed in another order: its last bit may
    differ.

    Args:
        x: (num_rows, size).
        weight: (num_outputs, size).
        tiling: from `choose_split_tiling` for these sizes.

    Returns:
        (num_parts, num_rows, num_outputs) float32; its sum over the parts is the product.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    require_shape((None, None), x=x)
    num_rows, size = x.shape
    require_shape((None, size), weight=weight)
    require_same_dtype(x=x, weight=weight)
    num_outputs, num_parts = weight.shape[0], tiling.num_parts
    sums = torch.empty(num_parts, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    if sums.numel():
        num_row_blocks = ceil_div(num_rows, tiling.block_rows)
        _split_matmul[(num_row_blocks, ceil_div(num_outputs, tiling.block_outputs), num_parts)](
            *(x, weight, sums, num_rows),
            num_outputs=num_outputs,
            size=size,
            num_steps=ceil_div(size, num_parts * tiling.block_size),
            num_parts=num_parts,
            block_rows=tiling.block_rows,
            block_outputs=tiling.block_outputs,
            block_size=tiling.block_size,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            **early_start(x.device),
        )
    return sums


@triton.jit
def _split_matmul(
    x,
    weight,
    sums,
    num_rows,
    num_outputs: tl.constexpr,
    size: tl.constexpr,
    num_steps: tl.constexpr,
    num_parts: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_size: tl.constexpr,
    is_early: tl.constexpr,
):
    let_next_start(is_early)
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    outputs = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    part = tl.program_id(2)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    x_rows = x + rows.to(tl.int64) * size
    weight_rows = weight + outputs.to(tl.int64) * size
    is_even: tl.constexpr = num_parts * num_steps * block_size == size
    wait_for_previous(is_early)

    product = tl.zeros((block_rows, block_outputs), dtype=tl.float32)
    for step in range(num_steps):
        columns = (part * num_steps + step) * block_size + tl.arange(0, block_size)
        x_tile = _load(x_rows, is_row, columns, size, is_even)
        tile = _load(weight_rows, is_output, columns, size, is_even)
        product = tl.dot(x_tile, tile.T, product, input_precision="ieee")

    places = (part.to(tl.int64) * num_rows + rows)[:, None] * num_outputs + outputs[None, :]
    tl.store(sums + places, product, mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _load(rows, is_row, columns, size: tl.constexpr, is_even: tl.constexpr):
    """Load some columns of some rows.

    Rows that do not exist are masked. Reading the last row again instead would be correct too, but
    slow: hundreds of programs would read the same cache lines.
    """
    is_in = is_row[:, None]
    if not is_even:  # the last part is shorter
        is_in = is_in & (columns < size)[None, :]
    return tl.load(rows[:, None] + columns[None, :], mask=is_in, other=0.0)
