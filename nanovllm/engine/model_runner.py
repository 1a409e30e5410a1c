"""ModelRunner: Batch -> tokens. The only place where sequences become tensors and come back.

Knows the model, the pages' tensors and the device. Does not know queues or why a batch is what it
is. vLLM's counterpart is `vllm/v1/worker/gpu_model_runner.py`.

Start-up, in the article's order: take a place among the ranks, load the weights, work out how many
KV pages fit, allocate them and hand each layer its slice. (The warm-up that shows the memory peak
and the CUDA graphs belong to GPUs: a CPU has neither an allocator that counts nor graphs.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanovllm.engine.kv_cache import allocate_kv_cache, estimate_budget
from nanovllm.engine.model_inputs import DecodeInputs, prepare_decode, prepare_prefill
from nanovllm.layers.attention import Attention, make_attention_backend
from nanovllm.layers.logprobs import sampled_logprobs
from nanovllm.layers.sampler import Sampler, SamplingTensors
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import Context, forward_context
from nanovllm.utils.loader import load_model

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.model_inputs import PrefillInputs
    from nanovllm.engine.sequence import Sequence
    from nanovllm.models.config import ModelConfig
    from nanovllm.observer import Observer


class ModelRunner:
    """Holds the model and its KV cache on one device.

    Args:
        config: the engine's settings, resolved.
        model_config: the checkpoint's shape.
        observer: told of each stage of the start-up and of each step.

    Raises:
        WeightsError: the checkpoint does not hold exactly this model's tensors.
        KVCacheError: not one KV page fits.
    """

    def __init__(self, config: Config, model_config: ModelConfig, observer: Observer) -> None:
        self.config = config
        self.observer = observer
        self.device = torch.device(config.device)
        dtype = getattr(torch, config.dtype)
        observer.tp_runtime_init(0, config.tensor_parallel_size, config.device, None)

        backend = make_attention_backend(config.attention_backend)
        self.model = Qwen3ForCausalLM(model_config, backend).to(dtype=dtype, device=self.device)
        self.model.eval()
        loaded = load_model(self.model, config.model)
        observer.model_weights_loaded(loaded)

        budget = estimate_budget(config, model_config, dtype)
        self.num_kvcache_blocks = budget.num_blocks
        self.kv_cache = allocate_kv_cache(budget, dtype, self.device)
        attention_layers = [m for m in self.model.modules() if isinstance(m, Attention)]
        for layer, (k_cache, v_cache) in zip(
            attention_layers, zip(*self.kv_cache, strict=True), strict=True
        ):
            layer.k_cache, layer.v_cache = k_cache, v_cache
        observer.kv_budget_estimate(budget)

        self.sampler = Sampler()
        self.eager_reason = "enforce_eager" if config.enforce_eager else "device_has_no_graphs"
        observer.cudagraph_skip(self.eager_reason)

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[int]:
        """Compute the batch's tokens and sample one for each of `batch.sampled_seqs`."""
        input_ids, positions, context = self._prepare(batch)
        with forward_context(context):
            hidden = self.model(input_ids, positions)  # (num_tokens, hidden_size)
            logits = self.model.compute_logits(hidden)  # (num_sampled, vocab_size), float32
        reason = self.eager_reason if batch.phase == "decode" else batch.phase
        num_tokens = input_ids.numel()
        self.observer.run_eager(reason, num_tokens)
        if not batch.sampled_seqs:  # an unfinished chunk: its logits mean nothing yet
            return []
        token_ids: list[int] = self.sampler(logits, sampling_tensors(batch.sampled_seqs)).tolist()
        add_logprobs(batch.sampled_seqs, logits, token_ids)
        self.observer.sample_tokens(batch.sampled_seqs, token_ids)
        return token_ids

    def _prepare(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Context]:
        block_size = self.config.kvcache_block_size
        inputs: PrefillInputs | DecodeInputs
        if batch.phase != "decode":  # prefills and mixed steps: any number of tokens a sequence
            inputs = prepare_prefill(batch, block_size)
            context = self._prefill_context(inputs)
            self.observer.prepare_prefill_tensors(inputs)
        else:
            inputs = prepare_decode(batch, block_size)
            context = self._decode_context(inputs)
            self.observer.prepare_decode_tensors(inputs)
        input_ids = self._tensor(inputs.input_ids, torch.int64)
        return input_ids, self._tensor(inputs.positions, torch.int64), context

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


def add_logprobs(seqs: list[Sequence], logits: torch.Tensor, token_ids: list[int]) -> None:
    """Give the sequences that ask for log-probabilities those of their new tokens."""
    asked = [seq.sampling_params.logprobs for seq in seqs]
    for row, found in sampled_logprobs(logits, token_ids, asked).items():
        logprobs = seqs[row].logprobs
        if logprobs is not None:
            logprobs.append(found)


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
