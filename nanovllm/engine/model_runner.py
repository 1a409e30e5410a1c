"""ModelRunner: Batch -> tokens. The only place where sequences become tensors and come back.

Knows the model, the pages' tensors and the device. Does not know queues or why a batch is what it
is. vLLM's counterpart is `vllm/v1/worker/gpu_model_runner.py`.

Start-up, in the article's order: take a place among the ranks, load the weights, work out how many
KV pages fit, allocate them and hand each layer its slice. (The warm-up that shows the memory peak
and the CUDA graphs belong to GPUs: a CPU has neither an allocator that counts nor graphs.)

With tensor parallelism every rank has a ModelRunner and calls `compute` with the same inputs. Rank
0 alone lays the batch out and samples (`run`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from nanovllm.engine.kv_cache import allocate_kv_cache, estimate_budget
from nanovllm.engine.model_inputs import PrefillInputs, Step, prepare_decode, prepare_prefill
from nanovllm.layers.attention import Attention, make_attention_backend
from nanovllm.layers.logprobs import sampled_logprobs
from nanovllm.layers.sampler import Sampler, SamplingTensors
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import Context, forward_context
from nanovllm.utils.loader import load_model
from nanovllm.utils.threads import threads_for

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.kv_cache import KVBudget
    from nanovllm.engine.model_inputs import DecodeInputs
    from nanovllm.engine.ranks import Ranks
    from nanovllm.engine.sequence import Sequence
    from nanovllm.models.config import ModelConfig
    from nanovllm.observer import Observer


class ModelRunner:
    """Holds the model and its KV cache on one device.

    Args:
        config: the engine's settings, resolved.
        model_config: the checkpoint's shape.
        observer: told of each stage of the start-up and of each step.
        ranks: this process's place among those that share the model.

    Raises:
        WeightsError: the checkpoint does not hold exactly this model's tensors.
        KVCacheError: not one KV page fits.
        WorkerError: another rank failed.
    """

    def __init__(
        self, config: Config, model_config: ModelConfig, observer: Observer, ranks: Ranks
    ) -> None:
        self.config = config
        self.observer = observer
        self.ranks = ranks
        self.device = ranks.parallel.device
        parallel, device = ranks.parallel, str(ranks.parallel.device)
        observer.tp_runtime_init(parallel.rank, parallel.world_size, device, parallel.backend)
        with ranks.starting():
            self._load(model_config)
            budget = self._make_kv_cache(model_config)
        observer.kv_budget_estimate(budget)

        self.sampler = Sampler()
        self.eager_reason = "enforce_eager" if config.enforce_eager else "device_has_no_graphs"
        observer.cudagraph_skip(self.eager_reason)

    def _load(self, model_config: ModelConfig) -> None:
        dtype = getattr(torch, self.config.dtype)
        backend = make_attention_backend(self.config.attention_backend)
        model = Qwen3ForCausalLM(model_config, backend, self.ranks.parallel)
        self.model = model.to(dtype=dtype, device=self.device).eval()
        loaded = load_model(self.model, self.config.model)
        self.largest_weight = self.model.largest_weight
        self.model.pack()
        self.observer.model_weights_loaded(loaded)

    def _make_kv_cache(self, model_config: ModelConfig) -> KVBudget:
        dtype = getattr(torch, self.config.dtype)
        parallel = self.ranks.parallel
        budget = estimate_budget(
            self.config, model_config, dtype, parallel, self.ranks.num_local_ranks
        )
        # A page is the same tokens on every rank, so the one with the least room decides.
        budget = dataclasses.replace(budget, num_blocks=parallel.min(budget.num_blocks))
        self.num_kvcache_blocks = budget.num_blocks
        self.kv_cache = allocate_kv_cache(budget, dtype, self.device)
        attention_layers = [m for m in self.model.modules() if isinstance(m, Attention)]
        for layer, (k_cache, v_cache) in zip(
            attention_layers, zip(*self.kv_cache, strict=True), strict=True
        ):
            layer.k_cache, layer.v_cache = k_cache, v_cache
        return budget

    @torch.inference_mode()
    def run(self, batch: Batch, engine_step: int) -> list[int]:
        """Compute the batch's tokens and sample one for each of `batch.sampled_seqs`."""
        prepare = prepare_decode if batch.phase == "decode" else prepare_prefill
        inputs = prepare(batch, self.config.kvcache_block_size)
        logits = self.compute(Step(engine_step, batch.phase, inputs))
        if not batch.sampled_seqs:  # an unfinished chunk: its logits mean nothing yet
            return []
        token_ids = self._sample(logits, batch.sampled_seqs)
        self.observer.sample_tokens(batch.sampled_seqs, token_ids)
        return token_ids

    @torch.inference_mode()
    def compute(self, step: Step) -> torch.Tensor:
        """This rank's part of a step. Rank 0 gets the logits, (num_sampled, vocab_size) float32."""
        inputs = step.inputs
        if isinstance(inputs, PrefillInputs):  # any number of tokens a sequence
            context = self._prefill_context(inputs)
            self.observer.prepare_prefill_tensors(inputs)
        else:
            context = self._decode_context(inputs)
            self.observer.prepare_decode_tensors(inputs)
        input_ids = self._tensor(inputs.input_ids, torch.int64)
        positions = self._tensor(inputs.positions, torch.int64)
        threads = threads_for(input_ids.numel(), self.largest_weight)
        with self.ranks.computing(step), forward_context(context), threads:
            hidden = self.model(input_ids, positions)  # (num_tokens, hidden_size)
            logits = self.model.compute_logits(hidden)
        reason = self.eager_reason if step.phase == "decode" else step.phase
        num_tokens = input_ids.numel()
        self.observer.run_eager(reason, num_tokens)
        return logits

    def _sample(self, logits: torch.Tensor, seqs: list[Sequence]) -> list[int]:
        """Draw on rank 0, which has the logits, and tell the ranks that go on with the tokens."""
        token_ids: list[int] = []
        found: dict[int, dict[int, float]] = {}
        if self.ranks.parallel.rank == 0:
            token_ids = self.sampler(logits, sampling_tensors(seqs)).tolist()
            asked = [seq.sampling_params.logprobs for seq in seqs]
            found = sampled_logprobs(logits, token_ids, asked)
        token_ids, found = self.ranks.agree((token_ids, found))
        for row, logprobs in found.items():
            kept = seqs[row].logprobs
            if kept is not None:
                kept.append(logprobs)
        return token_ids

    def _prefill_context(self, inputs: PrefillInputs) -> Context:
        tables = inputs.block_tables
        cu_seqlens_k = self._tensor(inputs.cu_seqlens_k, torch.int32)
        return Context(
            phase="prefill",
            slot_mapping=self._tensor(inputs.slot_mapping, torch.int64),
            cu_seqlens_q=self._tensor(inputs.cu_seqlens_q, torch.int32),
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=inputs.max_seqlen_q,
            max_seqlen_k=inputs.max_seqlen_k,
            context_lens=cu_seqlens_k.diff(),
            block_tables=None if tables is None else self._tensor(tables, torch.int32),
            logits_indices=self._tensor(inputs.logits_indices, torch.int64),
        )

    def _decode_context(self, inputs: DecodeInputs) -> Context:
        num_seqs = len(inputs.input_ids)
        context_lens = self._tensor(inputs.context_lens, torch.int32)
        cu_seqlens_k = torch.zeros(num_seqs + 1, dtype=torch.int32, device=self.device)
        cu_seqlens_k[1:] = context_lens.cumsum(0)
        return Context(
            phase="decode",
            slot_mapping=self._tensor(inputs.slot_mapping, torch.int64),
            cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32, device=self.device),
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=1,
            max_seqlen_k=max(inputs.context_lens),
            context_lens=context_lens,
            block_tables=self._tensor(inputs.block_tables, torch.int32),
            logits_indices=None,
        )

    def _tensor(self, values: list[int] | list[list[int]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def sampling_tensors(seqs: list[Sequence]) -> SamplingTensors:
    """What the sampler must know of each sequence; the position is that of the token to come."""
    params = [seq.sampling_params for seq in seqs]
    return SamplingTensors.from_lists(
        temperatures=[p.temperature for p in params],
        top_ks=[p.top_k for p in params],
        top_ps=[p.top_p for p in params],
        seeds=[seq.seed for seq in seqs],
        positions=[seq.num_tokens for seq in seqs],
    )
