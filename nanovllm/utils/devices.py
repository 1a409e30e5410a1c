"""Which device and data type an "auto" means, how much memory there is, and if that is too little.

Knows torch's view of the machine. Does not know what the engine needs.

| device | checkpoint            | dtype="auto"                                                   |
|--------|-----------------------|----------------------------------------------------------------|
| CPU    | any                   | float32: CPUs compute it fastest, and it agrees with references |
| GPU    | float16, bfloat16     | the checkpoint's own, where the GPU can compute it              |
| GPU    | bfloat16, before Ampere | float16                                                       |
| GPU    | float32, or not said  | bfloat16; float16 before Ampere                                |
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
        ValueError: "cuda" was asked for, and torch sees no GPU.
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
        stored: what the checkpoint was saved in; None if it does not say.
        capability: the GPU's compute capability.

    Raises:
        ValueError: bfloat16 was asked for on a GPU that cannot compute it.
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
    """Return the compute capability of the GPU in use; (0, 0) of a CPU."""
    return torch.cuda.get_device_capability() if device == "cuda" else (0, 0)


def device_memory(device: torch.device) -> tuple[int, int]:
    """Total and free bytes of a GPU's memory, as the driver counts them for all its programs.

    For a CPU, `cpu_memory`.
    """
    if device.type != "cuda":
        return cpu_memory()
    free, total = torch.cuda.mem_get_info(device)
    return total, free


def cpu_memory() -> tuple[int, int]:
    """Total and free bytes of this machine's memory, or of the container's share of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _meminfo_available() or total // 2  # where the system does not say: assume half
    limit, used = _cgroup_memory()
    if limit is not None and limit < total:
        return limit, max(min(limit - used, free), 0)
    return total, min(free, total)


def no_block_fits(budget: KVBudget) -> KVCacheError:
    """Say why not one KV block fits, and what to do."""
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
    """Say that so many KV blocks cannot be allocated, and what to do."""
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
    # Cached files are given back on demand: they do not count as used.
    cached = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
    return int(limit), max(used - cached, 0)
