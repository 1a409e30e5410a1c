"""skinny_matmul: few rows times a large weight, which is loaded before the kernel waits.

With few rows there is little arithmetic for each number of the weight, so the time is that of
reading the weight. One row is computed by `row_matmul`. A tensor core multiplies 16 rows at once,
so 2 to 16 rows take the same time. A program has a few rows of the weight, and each of its warps a
part of their length, so that there is no long chain of dependent multiplications:

                        part 0      part 1      part 2      part 3       one step along `size`
        x            [ 16 x 256  | 16 x 256  | 16 x 256  | 16 x 256  ]
        weight       [  8 x 256  |  8 x 256  |  8 x 256  |  8 x 256  ]
        warp             0           1           2           3
        sums         [  16 x 8  ] + [ 16 x 8  ] + [ 16 x 8  ] + [ 16 x 8  ]   added at the end

The program loads its weight before it waits for the previous kernel (see `launch`), as much of it
as the registers hold.

Every program has whole rows of the weight, so it has whole sums, and also does what comes after
them: the addition of the residual stream, or silu(gate) * up.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Triton has no types, and types a kernel's arguments itself.

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from nanovllm.gpu.kernels.activation import gated
from nanovllm.gpu.kernels.grid import ceil_div, choose_skinny_tiling, num_skinny_ahead
from nanovllm.gpu.kernels.launch import (
    early_start,
    let_next_start,
    require_same_dtype,
    require_shape,
    shared_memory_bytes,
    wait_for_previous,
)
from nanovllm.gpu.kernels.norm import add_rms_norm, add_rounded
from nanovllm.gpu.kernels.row_matmul import MAX_SIZE, multiply_row

MAX_ROWS = 16


def is_skinny(num_rows: int) -> bool:
    """Say whether `skinny_matmul` takes so many rows. For more rows, other kernels are faster."""
    return num_rows <= MAX_ROWS


def skinny_matmul(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    is_gate_up: bool = False,
) -> Tensor:
    """norm(x) @ weight.T + residual, or silu(gate) * up; norm and residual only if given.

    The oracle is `RMSNorm`, `functional.linear`, and an addition or `SiluAndMul`, one after
    another. The product is summed in another order: its last bit may differ.

    Args:
        x: (num_rows, size), at most `MAX_ROWS` rows.
        weight: (num_outputs, size); with `is_gate_up` the rows of gate, then as many of up.
            It must not be the output of the previous kernel.
        norm_weight: (size,).
        eps: added to the mean square; used with `norm_weight` only.
        residual: (num_rows, num_outputs).
        is_gate_up: multiply the two halves of the outputs, as the MLP does.

    Returns:
        (num_rows, num_outputs), with `is_gate_up` half as many outputs; as `x` is.

    Raises:
        ValueError: a shape or dtype does not fit, or there are too many rows.
    """
    require_shape((None, None), x=x)
    num_rows, size = x.shape
    require_shape((None, size), weight=weight)
    num_outputs = weight.shape[0]
    if not is_skinny(num_rows):
        raise ValueError(
            f"skinny_matmul takes at most {MAX_ROWS} rows, not {num_rows}: use functional.linear."
        )
    if is_gate_up:
        if num_outputs % 2:
            raise ValueError(f"weight must be gate and up stacked, but it has {num_outputs} rows.")
        num_outputs //= 2
    if norm_weight is not None:
        require_shape((size,), norm_weight=norm_weight)
    if residual is not None:
        require_shape((num_rows, num_outputs), residual=residual)
    require_same_dtype(x=x, weight=weight, norm_weight=norm_weight, residual=residual)
    if num_rows == 1 and size <= MAX_SIZE:
        return multiply_row(x, weight, norm_weight, eps, residual, num_outputs)
    if norm_weight is not None:
        x = add_rms_norm(x, None, norm_weight, eps)[0]
    return _multiply_rows(x, weight, residual, num_outputs)


def _multiply_rows(x: Tensor, weight: Tensor, residual: Tensor | None, num_outputs: int) -> Tensor:
    num_rows, size = x.shape
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if num_rows:
        num_weights = weight.shape[0] // num_outputs
        shared_memory = shared_memory_bytes(x.device)
        tiling = choose_skinny_tiling(size, num_weights, x.element_size(), shared_memory)
        _skinny_matmul[(ceil_div(num_outputs, tiling.block_outputs),)](
            *(x, weight, residual, out, num_rows),
            num_outputs=num_outputs,
            size=size,
            block_rows=MAX_ROWS,
            block_outputs=tiling.block_outputs,
            num_parts=tiling.num_warps,
            part_size=tiling.block_size // tiling.num_warps,
            num_ahead=num_skinny_ahead(tiling, size, num_weights),
            has_residual=residual is not None,
            is_gate_up=num_weights > 1,
            num_warps=tiling.num_warps,
            **early_start(x.device),
        )
    return out


@triton.jit
def _skinny_matmul(
    x,
    weight,
    residual,
    out,
    num_rows,
    num_outputs: tl.constexpr,
    size: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    num_parts: tl.constexpr,
    part_size: tl.constexpr,
    num_ahead: tl.constexpr,
    has_residual: tl.constexpr,
    is_gate_up: tl.constexpr,
    is_early: tl.constexpr,
):
    let_next_start(is_early)
    step_size: tl.constexpr = num_parts * part_size
    # A step: (num_parts, block_rows, part_size) @ (num_parts, part_size, block_outputs)
    firsts = tl.arange(0, num_parts)[:, None, None] * part_size
    along = firsts + tl.arange(0, part_size)[None, None, :]
    down = firsts + tl.arange(0, part_size)[None, :, None]
    outputs = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    # Beyond the last output, the last one is computed again, and not stored.
    weight_rows = weight + tl.minimum(outputs, num_outputs - 1).to(tl.int64) * size
    up_rows = weight_rows + num_outputs * size
    tiles, up_tiles = tl.tuple(()), tl.tuple(())
    for step in tl.static_range(num_ahead):
        columns = step * step_size + down
        tiles += (_load_columns(weight_rows, columns, size),)
        if is_gate_up:
            up_tiles += (_load_columns(up_rows, columns, size),)
    wait_for_previous(is_early)

    product = tl.zeros((num_parts, block_rows, block_outputs), dtype=tl.float32)
    up = tl.zeros((num_parts, block_rows, block_outputs), dtype=tl.float32)
    for step in tl.static_range(num_ahead):
        x_tile = _load_x(x, step * step_size + along, num_rows, size, block_rows)
        product = tl.dot(x_tile, tiles[step], product, input_precision="ieee")
        if is_gate_up:
            up = tl.dot(x_tile, up_tiles[step], up, input_precision="ieee")
    for begin in range(num_ahead * step_size, size, step_size):  # the rest of a very long row
        x_tile = _load_x(x, begin + along, num_rows, size, block_rows)
        product = tl.dot(
            x_tile, _load_columns(weight_rows, begin + down, size), product, input_precision="ieee"
        )
        if is_gate_up:
            up = tl.dot(
                x_tile, _load_columns(up_rows, begin + down, size), up, input_precision="ieee"
            )

    total = tl.sum(product, axis=0).to(out.dtype.element_ty)  # over the parts
    if is_gate_up:
        total = gated(total.to(tl.float32), tl.sum(up, axis=0).to(total.dtype))
    rows = tl.arange(0, block_rows)[:, None]
    places = rows * num_outputs + outputs[None, :]
    is_out = (rows < num_rows) & (outputs < num_outputs)[None, :]
    if has_residual:
        total = add_rounded(total, tl.load(residual + places, mask=is_out, other=0.0))
    tl.store(out + places, total, mask=is_out)


@triton.jit
def _load_columns(weight_rows, columns, size):
    """Load (num_parts, part_size, block_outputs) of a weight."""
    return tl.load(weight_rows[None, None, :] + columns, mask=columns < size, other=0.0)


@triton.jit
def _load_x(x, columns, num_rows, size, block_rows: tl.constexpr):
    """Load (num_parts, block_rows, part_size) of `x`."""
    rows = tl.arange(0, block_rows)[None, :, None]
    return tl.load(x + rows * size + columns, mask=(rows < num_rows) & (columns < size), other=0.0)
