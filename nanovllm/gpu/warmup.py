"""The dummy steps that measure how much memory a step takes on a GPU.

How many KV blocks fit depends on what the largest step allocates beside them, which cannot be
computed from the model's config. So the largest steps are run before the blocks are allocated: the
largest prefill, the largest sampling, and the largest decode that is captured as a graph.

    max_num_batched_tokens = 16384, max_model_len = 4096:    4 prompts of 4096 tokens

All slots are -1, so nothing is written to the cache. For the fused kernels, which need a cache,
each layer has one block during the warm-up.

vLLM's counterpart is `profile_run` in `vllm/v1/worker/gpu/model_runner.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nanovllm.gpu.cuda_graphs import make_decode_graphs, why_no_graphs
from nanovllm.layers.attention import Attention
from nanovllm.layers.context import Context, forward_context
from nanovllm.layers.sampler import SamplingTensors
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.utils.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What the dummy steps of the warm-up took on a GPU, in bytes of torch's allocator.

    Attributes:
        peak_bytes: the most that was allocated at once.
        current_bytes: allocated between steps: the weights, and one block in each layer.
        graph_pool_bytes: what the largest CUDA graph needs; the others reuse its memory.
    """

    peak_bytes: int
    current_bytes: int
    graph_pool_bytes: int


def largest_prefill(config: Config) -> tuple[int, int]:
    """Number and length of the prompts of the largest prefill: the fewest that fill a step."""
    num_seqs = -(-config.max_num_batched_tokens // config.max_model_len)
    num_seqs = min(num_seqs, config.max_num_seqs)
    return num_seqs, min(config.max_num_batched_tokens // num_seqs, config.max_model_len)


@torch.inference_mode()
def measure_step_memory(runner: ModelRunner, model_config: ModelConfig) -> StepMemory | None:
    """Compute the largest steps on the runner's GPU and measure their memory. None on a CPU.

    Raises:
        torch.OutOfMemoryError: the weights and one step do not fit.
    """
    config, device = runner.config, runner.device
    if device.type != "cuda":
        return None
    one_block = (
        *(2, model_config.num_hidden_layers, 1, config.kvcache_block_size),
        *(runner.ranks.parallel.num_heads(model_config.num_key_value_heads), model_config.head_dim),
    )
    if runner.fused is not None:  # its kernels need a cache, even if they do not write to it
        runner.use_kv_cache(torch.zeros(one_block, dtype=runner.dtype, device=device))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    current_bytes = torch.cuda.memory_allocated(device)

    num_seqs, seq_len = largest_prefill(config)
    logits = _prefill(runner, num_seqs, seq_len)
    if runner.ranks.parallel.rank == 0:
        num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        shape = num_rows, model_config.vocab_size
        logits = torch.zeros(shape, dtype=runner.dtype, device=device)
        _sample(runner, logits.float())  # at the peak, both tensors are allocated
    del logits
    runner.ranks.parallel.await_device()
    torch.cuda.synchronize(device)
    peak_bytes = torch.cuda.max_memory_allocated(device)
    runner.observer.warmup_model(num_seqs, seq_len, peak_bytes)

    graph_pool_bytes = 0
    if why_no_graphs(config, is_fused=runner.fused is not None) is None:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        graphs = make_decode_graphs(runner, model_config)
        graphs.run(graphs.sizes[-1])
        runner.ranks.parallel.await_device()
        torch.cuda.synchronize(device)
        graph_pool_bytes = torch.cuda.max_memory_allocated(device) - before
        del graphs
    if runner.fused is not None:
        for module in runner.model.modules():  # free the memory of the one block
            if isinstance(module, Attention):
                module.k_cache = module.v_cache = None
    torch.cuda.empty_cache()
    return StepMemory(peak_bytes, current_bytes, graph_pool_bytes)


def _prefill(runner: ModelRunner, num_seqs: int, seq_len: int) -> torch.Tensor:
    num_tokens, device = num_seqs * seq_len, runner.device
    ends = torch.arange(1, num_seqs + 1, device=device) * seq_len
    cu_seqlens = torch.cat((ends.new_zeros(1), ends)).int()
    context = Context(
        phase="prefill",
        slot_mapping=torch.full((num_tokens,), -1, device=device),
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=seq_len,
        max_seqlen_k=seq_len,
        context_lens=cu_seqlens.diff(),
        block_tables=None,
        logits_indices=ends - 1,
    )
    input_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(seq_len, device=device).repeat(num_seqs)
    with forward_context(context):
        return runner.forward(input_ids, positions)


def _sample(runner: ModelRunner, logits: torch.Tensor) -> None:
    """Sample every row in the way that takes the most memory: with top-k and top-p."""
    num_rows = len(logits)
    params, zeros = [SamplingParams(top_k=2, top_p=0.5)] * num_rows, [0] * num_rows
    runner.sampler(logits, SamplingTensors(params, zeros, zeros, logits.device))
