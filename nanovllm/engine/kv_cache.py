"""The KV cache: how many blocks fit into the memory, and their tensors.

`block_manager.py` assigns the blocks to sequences. vLLM's counterpart of this module is
`determine_available_memory` in `vllm/v1/worker/`.

`gpu_memory_utilization` is the fraction of the memory that all programs together may use. On a GPU
the engine uses all that is left of it. A dummy step of the largest size shows how much memory a
step needs besides the weights; the rest is for the cache:

    |<------------------ total * utilization ------------------>|
    | used: weights, and | peak - current: | graph |  KV blocks  |          |
    | other programs     | a step's tensors| pool  |             |

The graph pool is the memory that CUDA graphs keep. On a CPU the memory of a step is not measured,
and other programs need memory too: the budget is what is free within `gpu_memory_utilization` of
the memory, but at most 2 GiB, and the ranks of a machine share it. `num_kvcache_blocks=` overrides
both rules. A block holds the same tokens on every
rank, for the heads of that rank; so the rank with the fewest blocks sets the number for all.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import torch

from nanovllm.utils.devices import GIB, device_memory, no_block_fits, too_many_blocks

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.gpu.warmup import StepMemory
    from nanovllm.parallel.ranks import Ranks
    from nanovllm.utils.model_config import ModelConfig

CPU_KV_CACHE_LIMIT = 2 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBudget:
    """Every term of the calculation of the number of blocks. Sizes are in bytes, of one rank.

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


def estimate_budget(
    config: Config, model: ModelConfig, ranks: Ranks, step_memory: StepMemory | None = None
) -> KVBudget:
    """Compute how many blocks fit into the memory of this rank.

    Args:
        config: the engine's settings, resolved.
        model: the model's config.
        ranks: how many of the KV heads this rank has, and how many ranks share this machine.
        step_memory: what the warm-up measured on a GPU; None on a CPU.

    Raises:
        KVCacheError: not one block fits.
    """
    total, free = device_memory(ranks.parallel.device)
    used = total - free
    num_kv_heads = ranks.parallel.num_heads(model.num_key_value_heads)
    dtype_bytes = getattr(torch, config.dtype).itemsize
    per_token = 2 * model.num_hidden_layers * num_kv_heads * model.head_dim * dtype_bytes
    block_bytes = config.kvcache_block_size * per_token
    available = int(total * config.gpu_memory_utilization) - used
    rule: Literal["cpu_bounded", "gpu_measured", "given"] = "cpu_bounded"
    if step_memory is None:
        available = min(available, CPU_KV_CACHE_LIMIT) // ranks.num_local_ranks
    else:
        rule = "gpu_measured"
        available -= step_memory.peak_bytes - step_memory.current_bytes
        available -= step_memory.graph_pool_bytes
    budget = KVBudget(
        rule=rule if config.num_kvcache_blocks is None else "given",
        total_bytes=total,
        free_bytes=free,
        used_bytes=used,
        **({} if step_memory is None else asdict(step_memory)),
        utilization=config.gpu_memory_utilization,
        limit_bytes=CPU_KV_CACHE_LIMIT if step_memory is None else None,
        num_local_ranks=ranks.num_local_ranks,
        available_bytes=available,
        num_layers=model.num_hidden_layers,
        block_size=config.kvcache_block_size,
        num_kv_heads=num_kv_heads,
        head_dim=model.head_dim,
        dtype_bytes=dtype_bytes,
        block_bytes=block_bytes,
        num_blocks=config.num_kvcache_blocks or max(available, 0) // block_bytes,
    )
    if budget.num_blocks == 0:
        raise no_block_fits(budget)
    return budget


def allocate_kv_cache(budget: KVBudget, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The cache: (2, num_layers, num_blocks, block_size, num_kv_heads, head_dim), uninitialised.

    Raises:
        KVCacheError: the memory cannot be allocated.
    """
    shape = (
        *(2, budget.num_layers, budget.num_blocks),
        *(budget.block_size, budget.num_kv_heads, budget.head_dim),
    )
    # On a CPU more memory can be allocated than there is: it fails when that is written to.
    if budget.num_blocks * budget.block_bytes > budget.total_bytes:
        raise too_many_blocks(budget, device)
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise too_many_blocks(budget, device) from error
