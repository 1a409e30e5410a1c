"""add_rms_norm: the residual addition and the norm after it, in one kernel.

        x         ──┐
                    + ──> residual ──> mean of squares ──> * weight ──> normed
        residual  ──┘

One program for each row. The row is read once and stays in registers. If `x` is the output of
`split_matmul`, its parts are added up first.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Triton has no types, and types a kernel's arguments itself.

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from nanovllm.gpu.kernels.grid import next_power_of_two
from nanovllm.gpu.kernels.launch import (
    early_start,
    let_next_start,
    require_same_dtype,
    require_shape,
    wait_for_previous,
)

MAX_SIZE = 32768  # a row must fit in the registers of one program


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream and norm the sum (vLLM: fused_add_rms_norm).

    The oracle is `RMSNorm.add_and_norm`: the same sums, rounded at the same places.

    Args:
        x: (num_tokens, size); or (num_parts, num_tokens, size) float32, whose parts are added up.
        residual: (num_tokens, size); None if `x`, then without parts, begins the stream.
        weight: (size,).
        eps: added to the mean square.

    Returns:
        The normed sum, and the sum (`x` itself if there was no residual), in the weight's dtype.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    num_parts = x.shape[0] if x.dim() == 3 else 0  # noqa: PLR2004 -- parts, rows, columns
    require_shape((None, None, None) if num_parts else (None, None), x=x)
    num_tokens, size = x.shape[-2:]
    require_shape((size,), weight=weight)
    require_same_dtype(x=None if num_parts else x, residual=residual, weight=weight)
    if size > MAX_SIZE:
        raise ValueError(f"A row of {size} numbers is too long for one program: {MAX_SIZE} fit.")
    if residual is not None:
        require_shape((num_tokens, size), residual=residual)
    elif num_parts:
        raise ValueError("x in parts needs a residual.")
    normed = torch.empty(num_tokens, size, dtype=weight.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    if num_tokens:
        block = next_power_of_two(size)
        _add_rms_norm[(num_tokens,)](
            *(x, residual, weight, normed, total, num_tokens, size, eps),
            num_parts=num_parts,
            has_residual=residual is not None,
            block=block,
            num_warps=min(max(block // 256, 1), 16),
            **early_start(x.device),
        )
    return normed, total


@triton.jit
def _add_rms_norm(
    x,
    residual,
    weight,
    normed,
    total,
    num_tokens,
    size,
    eps,
    num_parts: tl.constexpr,
    has_residual: tl.constexpr,
    block: tl.constexpr,
    is_early: tl.constexpr,
):
    let_next_start(is_early)
    columns = tl.arange(0, block)
    is_in = columns < size
    scales = tl.load(weight + columns, mask=is_in, other=0.0)
    wait_for_previous(is_early)
    begin = tl.program_id(0).to(tl.int64) * size
    row = tl.load(x + begin + columns, mask=is_in, other=0.0)
    for part in tl.static_range(1, num_parts):
        row += tl.load(x + part * num_tokens * size + begin + columns, mask=is_in, other=0.0)
    row = row.to(scales.dtype)
    if has_residual:
        stream = tl.load(residual + begin + columns, mask=is_in, other=0.0)
        row = add_rounded(row, stream)
        tl.store(total + begin + columns, row, mask=is_in)
    wide = row.to(tl.float32)
    inverse = inverse_root_mean_square(tl.sum(wide * wide, axis=0), size, eps)
    tl.store(normed + begin + columns, scale_normed(wide * inverse, scales), mask=is_in)


@triton.jit
def add_rounded(x, residual):
    """Add to the residual stream, and round to its dtype."""
    return (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)


@triton.jit
def inverse_root_mean_square(sum_of_squares, size, eps):
    """Return what a row is multiplied by to have a root mean square of 1."""
    return tl.rsqrt(sum_of_squares / size + eps)


@triton.jit
def scale_normed(normed, weight):
    """Multiply float32 by the weight, rounding before and after, as `RMSNorm` does."""
    rounded = normed.to(weight.dtype).to(tl.float32)
    return (rounded * weight.to(tl.float32)).to(weight.dtype)
