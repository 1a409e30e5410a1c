"""The device and dtype that "auto" stands for, how much memory there is, and errors about it.

| device | checkpoint              | dtype="auto"                                                  |
|--------|-------------------------|---------------------------------------------------------------|
| CPU    | any                     | float32: CPUs compute it fastest, and it matches references   |
| GPU    | float16                 | float16                                                       |
| GPU    | bfloat16, float32, none | bfloat16; float16 on a GPU older than Ampere                  |
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanovllm.errors import KVCacheError

if TYPE_CHECKING:
    from nanovllm.engine.kv_cache import KVBudget

GIB = 1024**3
FIRST_WITH_BFLOAT16 = (8, 0)  # Ampere


def resolve_device(asked: str) -> str:
    """Return "cpu" or "cuda".

    Raises:
        ValueError: "cuda" was requested, and torch sees no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if asked == "auto":
        return "cuda" if has_gpu else "cpu"
    if asked == "cuda" and not has_gpu:
        how = "has no CUDA" if torch.version.cuda is None else "sees no GPU"
        raise ValueError(f"device='cuda', but torch {torch.__version__} {how}: use device='cpu'")
    return asked


def resolve_dtype(asked: str, device: str, stored: str | None, capability: tuple[int, int]) -> str:
    """Return float32, float16 or bfloat16.

    Args:
        asked: one of these, or "auto".
        device: "cpu" or "cuda".
        stored: the checkpoint's dtype; None if its config has none.
        capability: the GPU's compute capability.

    Raises:
        ValueError: bfloat16 was requested on a GPU that does not support it.
    """
    has_bfloat16 = device == "cpu" or capability >= FIRST_WITH_BFLOAT16
    if asked == "bfloat16" and not has_bfloat16:
        raise ValueError(
            f"this GPU (compute capability {capability[0]}.{capability[1]}) does not support "
            "bfloat16: use dtype='float16' or dtype='auto'"
        )
    if asked != "auto":
        return asked
    if device == "cpu":
        return "float32"
    if stored == "float16" or not has_bfloat16:
        return "float16"
    return "bfloat16"


def gpu_capability(device: str) -> tuple[int, int]:
    """Return the compute capability of the GPU in use; (0, 0) for a CPU."""
    return torch.cuda.get_device_capability() if device == "cuda" else (0, 0)


def device_memory(device: torch.device) -> tuple[int, int]:
    """Total and free bytes of the device's memory. On a GPU, all programs count."""
    if device.type != "cuda":
        return cpu_memory()
    free, total = torch.cuda.mem_get_info(device)
    return total, free


def cpu_memory() -> tuple[int, int]:
    """Total and free bytes of this machine's memory, or of the container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _meminfo_available() or total // 2  # if the system does not say, assume half
    limit, used = _cgroup_memory()
    if limit is not None and limit < total:
        return limit, max(min(limit - used, free), 0)
    return total, min(free, total)


def no_block_fits(budget: KVBudget) -> KVCacheError:
    """Return the error that says why not one KV block fits, and what to do."""
    total, used, limit = budget.total_bytes, budget.used_bytes, budget.limit_bytes
    is_gpu = limit is None
    step_bytes = int(total * budget.utilization) - used - budget.available_bytes if is_gpu else 0
    a_steps = f" - {step_bytes / GIB:.2f} GiB for a step's own tensors" if is_gpu else ""
    all_ranks_bytes = budget.block_bytes * (1 if is_gpu else budget.num_local_ranks)
    enough = math.ceil(1000 * (used + step_bytes + all_ranks_bytes) / total) / 1000
    can_raise = enough <= 1 and (limit is None or all_ranks_bytes <= limit)
    raising = f"raise gpu_memory_utilization to {enough:g}, " if can_raise else ""
    lowering = "lower max_num_batched_tokens, " if is_gpu else ""
    lowering += "lower kvcache_block_size, " if budget.available_bytes > 0 else ""
    return KVCacheError(
        f"no KV block fits: {total / GIB:.2f} GiB of memory x gpu_memory_utilization="
        f"{budget.utilization} - {used / GIB:.2f} GiB in use (by all programs){a_steps} leaves "
        f"{budget.available_bytes / GIB:.2f} GiB, and a block of {budget.block_size} tokens takes "
        f"{budget.block_bytes / GIB:.3f} GiB; free some memory, {raising}{lowering}or set "
        "num_kvcache_blocks"
    )


def too_many_blocks(budget: KVBudget, device: torch.device) -> KVCacheError:
    """Return the error that says that so many KV blocks cannot be allocated, and what to do."""
    size = budget.num_blocks * budget.block_bytes / GIB
    return KVCacheError(
        f"the {budget.num_blocks} KV blocks take {size:.2f} GiB, which {device} cannot allocate: "
        "lower num_kvcache_blocks"
    )


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    available = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((int(kib) * 1024 for kib in available), None)


def _cgroup_memory() -> tuple[int | None, int]:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        used = int((root / "memory.current").read_text(encoding="ascii"))
        stat = (root / "memory.stat").read_text(encoding="ascii").split()
    except OSError:
        return None, 0
    if limit == "max":
        return None, 0
    # The system frees cached files when memory is needed: they do not count as used.
    cached = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
    return int(limit), max(used - cached, 0)
