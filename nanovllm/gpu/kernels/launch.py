"""What all kernels share: how they follow one another, and how they refuse bad input.

From Hopper on, a kernel may start before the one before it has ended (Programmatic Dependent
Launch). It does whatever needs no result of its predecessor, and then waits:

        kernel 1   [ start | work .................. ]
        kernel 2                  [ start | weights | wait ][ work ............ ]
        time       ------------------------------------------------------------->

So the start of a kernel, and its first loads, cost nothing. Two rules keep it right: every program
waits before it touches what another kernel writes or reads, and every kernel waits, also the one
that needs nothing, so that "my predecessor has ended" means "all of them have". (The embedding is a
kernel of torch's own, launched the ordinary way: it starts when all before it has ended. So what
was written before it the layers may read at once: a step's positions and slots.)

Knows no layer.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Triton has no types, and types a kernel's arguments itself.

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.gpu.kernels.grid import MIN_BLOCK, next_power_of_two


@triton.jit
def let_next_start(is_early: tl.constexpr):
    """Allow the next kernel to start as soon as there is room for it."""
    if is_early:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(is_early: tl.constexpr):
    """Wait until all that earlier kernels have written can be seen."""
    if is_early:
        gdc_wait()


@cache
def starts_early(device: torch.device) -> bool:
    """Say whether kernels on this device may start before their predecessor has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def early_start(device: torch.device) -> dict[str, bool]:
    """Return what every launch of a kernel that waits is given: one word for us, one for Triton."""
    is_early = starts_early(device)
    return {"is_early": is_early, "launch_pdl": is_early}


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return how many programs can run side by side, each alone on its part of the chip."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Return how much of a multiprocessor's shared memory one program may take."""
    if device.type != "cuda":
        return 0
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return int(properties["max_shared_mem"])


def require_shape(shape: tuple[int | None, ...], **tensors: Tensor) -> None:
    """Refuse a tensor that is not of that shape (None: any size) or not contiguous.

    Raises:
        ValueError: says which, and what was expected.
    """
    for name, tensor in tensors.items():
        is_of_shape = tensor.dim() == len(shape) and all(
            wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
        )
        if not is_of_shape:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(f"{name} must have the shape ({wanted}), not {tuple(tensor.shape)}.")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous: call .contiguous() on it first.")


def require_same_dtype(**tensors: Tensor | None) -> None:
    """Refuse tensors that are not all of one floating-point dtype.

    Raises:
        ValueError: names each tensor's dtype.
    """
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"All must have the same dtype, but {found}.")


def require_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Refuse heads that the attention kernels cannot pack.

    Raises:
        ValueError: says which number, and what would do.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, but they are {num_heads} and "
            f"{num_kv_heads}."
        )
    if head_dim < MIN_BLOCK or head_dim != next_power_of_two(head_dim):
        raise ValueError(f"head_dim must be a power of two from {MIN_BLOCK} up, not {head_dim}.")
