"""What all kernels share: how one launches after another, and checks of their arguments.

From Hopper on, a kernel may start early, before the previous one has ended (Programmatic Dependent
Launch, PDL). It does what does not need the results of the previous kernel, and then waits:

        kernel 1   [ start | work .................. ]
        kernel 2                  [ start | weights | wait ][ work ............ ]
        time       ------------------------------------------------------------->

So the start of a kernel and its first loads take no extra time. Two rules keep it correct: every
program waits before it uses memory that another kernel reads or writes; and every kernel waits,
even one that does not need it, so that when the previous kernel has ended, all before it have too.
(The embedding is a kernel of torch, launched normally: it starts when all kernels before it have
ended. So the layers can read what was written before it without waiting: positions and slots.)
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
    """Wait until the previous kernels have ended, and what they have written is visible."""
    if is_early:
        gdc_wait()


@cache
def starts_early(device: torch.device) -> bool:
    """Say whether kernels on this device may start before the previous one has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def early_start(device: torch.device) -> dict[str, bool]:
    """Return the arguments for a launch of a kernel that waits: our own one, and Triton's."""
    is_early = starts_early(device)
    return {"is_early": is_early, "launch_pdl": is_early}


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of the GPU's multiprocessors; 1 for a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Return how much shared memory, in bytes, one program may use; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return int(properties["max_shared_mem"])


def require_shape(shape: tuple[int | None, ...], **tensors: Tensor) -> None:
    """Check that tensors have a shape (None: any size) and are contiguous.

    Raises:
        ValueError: the message has the tensor's name, and what was expected.
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
    """Check that all tensors have the same dtype.

    Raises:
        ValueError: the message has each tensor's dtype.
    """
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"All must have the same dtype, but {found}.")


def require_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Check that the attention kernels support these heads.

    Raises:
        ValueError: the message has the numbers, and what is supported.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, but they are {num_heads} and "
            f"{num_kv_heads}."
        )
    if head_dim < MIN_BLOCK or head_dim != next_power_of_two(head_dim):
        raise ValueError(f"head_dim must be a power of two from {MIN_BLOCK} up, not {head_dim}.")
