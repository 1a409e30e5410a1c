"""The KV cache: how many blocks the memory holds, and the blocks themselves.

Knows bytes and tensors. Does not know which sequence has a block (`block_manager.py`). vLLM's
counterpart is `determine_available_memory` in `vllm/v1/worker/`.

`gpu_memory_utilization` is the share of the memory that all programs together may fill. On a GPU
the engine takes all that is left of it. A made-up step of the largest size shows what a step needs
besides the weights; the rest is for the cache:

    |<------------------ total * utilization ------------------>|
    | used: weights, and | peak - current: | graph |  KV blocks  |          |
    | other programs     | a step's tensors| pool  |             |

On a CPU a step's memory is not measured, and a laptop runs other programs too: the budget is what
is free within `gpu_memory_utilization` of the memory, but at most 2 GiB, and the ranks of a machine
share it. `num_kvcache_blocks=` overrides both rules. A block holds the same tokens on every rank,
for that rank's heads; so the rank with the least room decides how many blocks there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from nanovllm.errors import KVCacheError
from nanovllm.parallel.tensor_parallel import ALONE
from nanovllm.utils.devices import cpu_memory, gpu_memory

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.parallel.tensor_parallel import TensorParallel
    from nanovllm.utils.model_config import ModelConfig

GIB = 1024**3
CPU_KV_CACHE_LIMIT = 2 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBudget:
    """Every term of the sum that ends in the number of blocks. All sizes in bytes, of one rank.

    num_blocks = available // block_bytes (the least of all ranks'), or as given;
    on a GPU    available = total * utilization - used - (peak - current) - graph_pool;
    on a CPU    available = min(total * utilization - used, limit) // num_local_ranks;
    block_bytes = 2 (K and V) * num_layers * block_size * num_kv_heads * head_dim * dtype_bytes.
    """

    rule: Literal["cpu_bounded", "gpu_measured", "given"]
    total_bytes: int
    free_bytes: int
    used_bytes: int
    peak_bytes: int | None = None
    current_bytes: int | None = None
    graph_pool_bytes: int | None = None
    utilization: float
    limit_bytes: int | None
    num_local_ranks: int
    available_bytes: int
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What the made-up steps of a warm-up took on a GPU, in bytes of torch's allocator.

    Attributes:
        peak_bytes: the most that was allocated at once.
        current_bytes: what is allocated between steps: the weights, and a block to warm up.
        graph_pool_bytes: what the CUDA graphs will need, judged by the largest one.
    """

    peak_bytes: int
    current_bytes: int
    graph_pool_bytes: int


def estimate_budget(
    config: Config,
    model: ModelConfig,
    dtype: torch.dtype,
    parallel: TensorParallel = ALONE,
    num_local_ranks: int = 1,
    *,
    step_memory: StepMemory | None = None,
) -> KVBudget:
    """Work out how many blocks this rank has room for.

    Args:
        config: the engine's settings, resolved.
        model: the checkpoint's shape.
        dtype: of the keys and values.
        parallel: which of the KV heads are this rank's.
        num_local_ranks: how many ranks share this machine's memory.
        step_memory: what a warm-up on a GPU showed; None on a CPU.

    Raises:
        KVCacheError: not one block fits.
    """
    is_gpu = step_memory is not None
    total, free = gpu_memory(parallel.device) if is_gpu else cpu_memory()
    used = total - free
    num_kv_heads, head_dim = parallel.num_heads(model.num_key_value_heads), model.head_dim
    per_token = 2 * model.num_hidden_layers * num_kv_heads * head_dim * dtype.itemsize
    block_bytes = config.kvcache_block_size * per_token
    room = int(total * config.gpu_memory_utilization) - used
    step_bytes = 0
    if step_memory is not None:
        step_bytes = step_memory.peak_bytes - step_memory.current_bytes
        step_bytes += step_memory.graph_pool_bytes
        available = room - step_bytes
    else:
        available = min(room, CPU_KV_CACHE_LIMIT) // num_local_ranks
    num_blocks = config.num_kvcache_blocks or max(available, 0) // block_bytes
    if num_blocks == 0:
        a_steps = f" - {step_bytes / GIB:.2f} GiB for a step's own tensors" if is_gpu else ""
        page_bytes = block_bytes * (1 if is_gpu else num_local_ranks)
        enough = math.ceil(1000 * (used + step_bytes + page_bytes) / total) / 1000
        can_raise = enough <= 1 and (is_gpu or page_bytes <= CPU_KV_CACHE_LIMIT)
        raising = f"raise gpu_memory_utilization to {enough:g}, " if can_raise else ""
        lowering = "lower max_num_batched_tokens, " if is_gpu else ""
        lowering += "lower kvcache_block_size, " if available > 0 else ""
        raise KVCacheError(
            f"no KV block fits: {total / GIB:.2f} GiB of memory x gpu_memory_utilization="
            f"{config.gpu_memory_utilization} - {used / GIB:.2f} GiB in use (by all programs)"
            f"{a_steps} leaves {available / GIB:.2f} GiB, and a block of "
            f"{config.kvcache_block_size} tokens takes {block_bytes / GIB:.3f} GiB; free some "
            f"memory, {raising}{lowering}or set num_kvcache_blocks"
        )
    rule: Literal["cpu_bounded", "gpu_measured", "given"]
    rule = "gpu_measured" if is_gpu else "cpu_bounded"
    return KVBudget(
        rule=rule if config.num_kvcache_blocks is None else "given",
        total_bytes=total,
        free_bytes=free,
        used_bytes=used,
        peak_bytes=None if step_memory is None else step_memory.peak_bytes,
        current_bytes=None if step_memory is None else step_memory.current_bytes,
        graph_pool_bytes=None if step_memory is None else step_memory.graph_pool_bytes,
        utilization=config.gpu_memory_utilization,
        limit_bytes=None if is_gpu else CPU_KV_CACHE_LIMIT,
        num_local_ranks=num_local_ranks,
        available_bytes=available,
        num_layers=model.num_hidden_layers,
        block_size=config.kvcache_block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype_bytes=dtype.itemsize,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
    )


def allocate_kv_cache(budget: KVBudget, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The cache: (2, num_layers, num_blocks, block_size, num_kv_heads, head_dim), uninitialised.

    Raises:
        KVCacheError: the memory cannot be allocated.
    """
    shape = (
        *(2, budget.num_layers, budget.num_blocks),
        *(budget.block_size, budget.num_kv_heads, budget.head_dim),
    )
    size = budget.num_blocks * budget.block_bytes
    refusal = KVCacheError(
        f"the {budget.num_blocks} KV blocks take {size / GIB:.2f} GiB, which {device} cannot "
        "allocate: lower num_kvcache_blocks"
    )
    if size > budget.total_bytes:  # a CPU would allocate them, and fail when they are used
        raise refusal
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise refusal from error
