"""ModelRunner: Batch -> tokens, with the model, the KV cache's tensors and the device.

vLLM's counterpart is `vllm/v1/worker/gpu/model_runner.py`.

Start-up, in the article's order (the ranks have been joined in `llm.py`): load the weights, compute
a dummy step to measure its memory, compute how many KV blocks fit, allocate them and give each
layer its slice, capture CUDA graphs. (On a CPU no step is measured and no graph is captured.)

A step is computed in one of three ways:

    eager             kernel by kernel, in plain torch: on any device; the others are tested by it
    fused             kernel by kernel too, with this project's kernels: on a GPU, without a graph
    graph replay      the fused step, captured: decodes; can be launched ahead (gpu/cuda_graphs.py)

With tensor parallelism every rank has a ModelRunner. Rank 0 prepares the inputs (`launch`) and
samples; the other ranks compute the same inputs (`parallel/worker.py`).
"""

from __future__ import annotations

import dataclasses
from array import array
from functools import partial
from typing import TYPE_CHECKING

import torch

from nanovllm.engine.core import Launched
from nanovllm.engine.kv_cache import KVBudget, allocate_kv_cache, estimate_budget
from nanovllm.engine.model_inputs import PrefillInputs, Step, prepare_decode, prepare_prefill
from nanovllm.gpu.attention_choice import make_attention_backend
from nanovllm.gpu.cuda_graphs import capture_graphs
from nanovllm.gpu.timer import GPUTimer, gpu_timer
from nanovllm.gpu.warmup import measure_step_memory
from nanovllm.layers.attention import Attention
from nanovllm.layers.context import Context, forward_context
from nanovllm.layers.linear import Linear
from nanovllm.layers.logprobs import sampled_logprobs
from nanovllm.layers.sampler import Sampler, SamplingTensors
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.devices import device_memory
from nanovllm.utils.loader import check_sizes, load_model
from nanovllm.utils.threads import threads_for

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from nanovllm.config import Config
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.model_inputs import DecodeInputs
    from nanovllm.engine.sequence import Sequence
    from nanovllm.gpu.qwen3_fused import FusedQwen3
    from nanovllm.observer import Observer
    from nanovllm.parallel.ranks import Ranks
    from nanovllm.utils.model_config import ModelConfig


class ModelRunner:
    """Holds the model and its KV cache on one device.

    Args:
        config: the engine's settings, resolved.
        model_config: the model's config.
        observer: called at each stage of the start-up and of each step.
        ranks: the processes that share the model, and which of them this one is.

    Raises:
        ModelConfigError: the model does not fit into the memory.
        WeightsError: the checkpoint's tensors are not exactly the model's.
        KVCacheError: not one KV block fits, or not as many as were requested.
        WorkerError: another rank failed.
    """

    def __init__(
        self, config: Config, model_config: ModelConfig, observer: Observer, ranks: Ranks
    ) -> None:
        self.config = config
        self.observer = observer
        self.ranks = ranks
        self.device = ranks.parallel.device
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.sampler = Sampler()
        self.sample = partial(sample_tokens, self.sampler, ranks)
        parallel, device = ranks.parallel, str(ranks.parallel.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        observer.tp_runtime_init(parallel.rank, parallel.world_size, device, parallel.backend)
        with ranks.starting():
            self._load(model_config)
            budget = self._make_kv_cache(model_config)
        observer.kv_budget_estimate(budget)
        self.graphs, self.eager_reason = capture_graphs(self, model_config)
        self.runs_ahead = self.graphs is not None and parallel.world_size == 1

    # -- start -----------------------------------------------------------------------------------

    def _load(self, model_config: ModelConfig) -> None:
        check_sizes(self.config.model, model_config)
        longest = self.config.max_model_len
        # The memory of all ranks together must hold the model. Checked before any is allocated.
        num_sharing = 1 if self.device.type == "cuda" else self.ranks.num_local_ranks
        memory = device_memory(self.device)[0] // num_sharing * self.ranks.parallel.world_size
        model_config.check_memory(self.config.model, memory, self.dtype.itemsize, longest)
        # No sequence is longer than max_model_len: a rotary table of more positions wastes memory.
        shape = dataclasses.replace(model_config, max_position_embeddings=longest)
        backend = make_attention_backend(self.config.attention_backend)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.device:  # the weights are allocated where they will be used
                model = Qwen3ForCausalLM(shape, backend, self.ranks.parallel)
        finally:
            torch.set_default_dtype(before)
        self.model = model.eval()
        loaded = load_model(self.model, self.config.model)
        linears = (m for m in self.model.modules() if isinstance(m, Linear))
        self.largest_weight = max(linear.weight.numel() for linear in linears)
        self.model.pack()
        self.fused: FusedQwen3 | None = None
        if self.config.fused_kernels:
            from nanovllm.gpu.qwen3_fused import FusedQwen3  # noqa: PLC0415 - imports Triton

            self.fused = FusedQwen3(self.model)
        self.observer.model_weights_loaded(loaded)

    def _make_kv_cache(self, model_config: ModelConfig) -> KVBudget:
        step_memory = measure_step_memory(self, model_config)  # None on a CPU
        budget = estimate_budget(self.config, model_config, self.ranks, step_memory)
        # A block holds the same tokens on every rank: take the lowest number of any rank.
        num_blocks = self.ranks.parallel.min(budget.num_blocks)
        budget = dataclasses.replace(budget, num_blocks=num_blocks)
        self.num_kvcache_blocks = budget.num_blocks
        self.kv_cache = allocate_kv_cache(budget, self.dtype, self.device)
        self.use_kv_cache(self.kv_cache)
        return budget

    def use_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Give each layer its slice of the cache, (2, num_layers, num_blocks, ...)."""
        attention_layers = [m for m in self.model.modules() if isinstance(m, Attention)]
        for layer, k_cache, v_cache in zip(attention_layers, *kv_cache, strict=True):
            layer.k_cache, layer.v_cache = k_cache, v_cache

    # -- a step ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, batch: Batch, engine_step: int) -> Launched:
        """Start to compute a batch. A GPU may still be busy when this returns."""
        prepare = prepare_decode if batch.phase == "decode" else prepare_prefill
        step = Step(engine_step, batch.phase, prepare(batch, self.config.kvcache_block_size))
        if self.graphs is not None and self.graphs.can_compute(step.inputs):
            return self.graphs.launch(batch, step, step.inputs)
        logits, timer = self.compute_eagerly(step)
        # If the step computed only a part of a prompt, there is nothing to sample.
        token_ids = self.sample(logits, batch.sampled_seqs) if batch.sampled_seqs else []
        return Launched(token_ids, None if timer is None else timer.elapsed_ns())

    def compute_eagerly(self, step: Step) -> tuple[torch.Tensor, GPUTimer | None]:
        """Compute this rank's part of a step without a graph.

        Returns:
            The logits of the sampled sequences (no rows, except on rank 0), and the timer of the
            step (None on a CPU).
        """
        inputs = step.inputs
        context = self._context(inputs)
        if isinstance(inputs, PrefillInputs):  # any number of tokens per sequence
            self.observer.prepare_prefill_tensors(inputs)
        else:
            self.observer.prepare_decode_tensors(inputs)
        input_ids, positions = self._tensor(inputs.input_ids), self._tensor(inputs.positions)
        num_tokens = input_ids.numel()
        threads = threads_for(num_tokens, self.largest_weight)  # one, if the products are small
        with self.ranks.computing(step):  # sends the step to the workers, and watches them
            with forward_context(context), threads, gpu_timer(self.device) as timer:
                logits = self.forward(input_ids, positions)
            self.ranks.parallel.await_device()
        no_graph = self.eager_reason or "batch_beyond_graphs"
        reason = no_graph if step.phase == "decode" else step.phase
        self.observer.run_eager(reason, num_tokens)
        return logits, timer

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute a step's logits, kernel by kernel, inside a `forward_context`."""
        model = self.model if self.fused is None else self.fused
        return model.compute_logits(model(input_ids, positions))

    def _context(self, inputs: PrefillInputs | DecodeInputs) -> Context:
        tables, sampled = inputs.block_tables, inputs.logits_indices
        return Context(
            phase="prefill" if isinstance(inputs, PrefillInputs) else "decode",
            slot_mapping=self._tensor(inputs.slot_mapping),
            cu_seqlens_q=self._tensor(inputs.cu_seqlens_q, torch.int32),
            cu_seqlens_k=self._tensor(inputs.cu_seqlens_k, torch.int32),
            max_seqlen_q=inputs.max_seqlen_q,
            max_seqlen_k=inputs.max_seqlen_k,
            context_lens=self._tensor(inputs.context_lens, torch.int32),
            block_tables=None
            if tables is None
            else torch.tensor(tables, dtype=torch.int32, device=self.device),
            logits_indices=None if sampled is None else self._tensor(sampled),
        )

    def _tensor(self, values: Seq[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """(num_values,). Through an array, which is faster for the many values of a prefill."""
        if not values:
            return torch.empty(0, dtype=dtype, device=self.device)
        typecode = "q" if dtype is torch.int64 else "i"
        return torch.frombuffer(array(typecode, values), dtype=dtype).to(self.device)


@torch.inference_mode()
def sample_tokens(
    sampler: Sampler, ranks: Ranks, logits: torch.Tensor, seqs: list[Sequence]
) -> list[int]:
    """Sample on rank 0, which has the logits, and send the tokens to the ranks that need them.

    Raises:
        LogitsError: a row of the logits has no finite maximum.
    """
    token_ids: list[int] = []
    found: dict[int, dict[int, float]] = {}
    if ranks.parallel.rank == 0:
        logits = logits.float()
        params, seeds = [seq.sampling_params for seq in seqs], [seq.seed for seq in seqs]
        next_positions = [seq.num_tokens for seq in seqs]
        rows = SamplingTensors(params, seeds, next_positions, logits.device)
        token_ids = sampler(logits, rows).tolist()
        found = sampled_logprobs(logits, token_ids, [p.logprobs for p in params])
    token_ids, found = ranks.agree((token_ids, found))
    for row, logprobs in found.items():
        seqs[row].logprobs.append(logprobs)
    return token_ids
