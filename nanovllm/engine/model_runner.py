"""ModelRunner: Batch -> tokens. The only place where sequences become tensors and come back.

Knows the model, the pages' tensors and the device. Does not know queues or why a batch is what it
is. vLLM's counterpart is `vllm/v1/worker/gpu/model_runner.py`.

Start-up, in the article's order: take a place among the ranks, load the weights, compute a made-up
step to see what memory it takes, work out how many KV pages fit, allocate them and hand each layer
its slice, record CUDA graphs. (A CPU has neither an allocator that counts nor graphs.)

A step goes one of three ways:

    eager             plain torch, kernel by kernel: everywhere, and the oracle of the others
    fused             this project's kernels, on a GPU: prefills and mixed steps
    a graph's replay  the fused step, recorded: decodes; perhaps launched ahead (graph_decoder.py)

With tensor parallelism every rank has a ModelRunner and calls `compute` with the same inputs. Rank
0 alone lays the batch out and samples (`launch`, `token_ids`).
"""

from __future__ import annotations

import dataclasses
from array import array
from typing import TYPE_CHECKING

import torch

from nanovllm.engine.kv_cache import allocate_kv_cache, cpu_memory, estimate_budget, gpu_memory
from nanovllm.engine.model_inputs import PrefillInputs, Step, prepare_decode, prepare_prefill
from nanovllm.gpu.graph_decoder import GraphDecoder
from nanovllm.gpu.timer import GpuTimer, Stretch
from nanovllm.gpu.warmup import measure_step_memory
from nanovllm.layers.attention import Attention, make_attention_backend
from nanovllm.layers.context import Context, forward_context
from nanovllm.layers.logprobs import sampled_logprobs
from nanovllm.layers.sampler import Sampler, SamplingTensors
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.loader import check_sizes, load_model
from nanovllm.utils.threads import threads_for

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.batch import Batch, Foresight
    from nanovllm.engine.kv_cache import KVBudget
    from nanovllm.engine.model_inputs import DecodeInputs
    from nanovllm.engine.sequence import Sequence
    from nanovllm.gpu.cuda_graphs import DecodeGraphs
    from nanovllm.gpu.qwen3_fused import FusedQwen3
    from nanovllm.observer import Observer
    from nanovllm.parallel.ranks import Ranks
    from nanovllm.utils.model_config import ModelConfig


class ModelRunner:
    """Holds the model and its KV cache on one device.

    Args:
        config: the engine's settings, resolved.
        model_config: the checkpoint's shape.
        observer: told of each stage of the start-up and of each step.
        ranks: this process's place among those that share the model.

    Raises:
        ModelConfigError: the memory cannot hold such a model.
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
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.timer = GpuTimer(self.device)
        self._step_stretch: Stretch | None = None  # the GPU's time of the step under way
        self.sampler = Sampler()
        self._logits: torch.Tensor | None = None  # of the step under way, if it is not a graph's
        parallel, device = ranks.parallel, str(ranks.parallel.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        observer.tp_runtime_init(parallel.rank, parallel.world_size, device, parallel.backend)
        with ranks.starting():
            self._load(model_config)
            budget = self._make_kv_cache(model_config)
        observer.kv_budget_estimate(budget)
        with ranks.starting():
            self._make_graphs(model_config)

    # -- start -----------------------------------------------------------------------------------

    def _load(self, model_config: ModelConfig) -> None:
        check_sizes(self.config.model, model_config, Qwen3ForCausalLM.shape_fields)
        self._check_memory(model_config)
        backend = make_attention_backend(self.config.attention_backend)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.device:  # the weights are allocated where they will be used
                model = Qwen3ForCausalLM(
                    model_config, backend, self.ranks.parallel, self.config.max_model_len
                )
        finally:
            torch.set_default_dtype(before)
        self.model = model.eval()
        loaded = load_model(self.model, self.config.model)
        self.largest_weight = self.model.largest_weight
        self.model.pack()
        self.fused: FusedQwen3 | None = None
        if self.config.fused_kernels:
            from nanovllm.gpu.qwen3_fused import FusedQwen3  # noqa: PLC0415 - imports Triton

            self.fused = FusedQwen3(self.model)
        self.observer.model_weights_loaded(loaded)

    def _check_memory(self, model_config: ModelConfig) -> None:
        """Can all ranks' memory together hold the model? Asked before any of it is allocated."""
        parallel = self.ranks.parallel
        if self.device.type == "cuda":
            own_bytes = gpu_memory(self.device)[0]
        else:
            own_bytes = cpu_memory()[0] // self.ranks.num_local_ranks
        total_bytes = own_bytes * parallel.world_size
        num_positions = self.config.max_model_len
        model_config.check_memory(
            self.config.model, total_bytes, self.dtype.itemsize, num_positions
        )

    def _make_kv_cache(self, model_config: ModelConfig) -> KVBudget:
        parallel = self.ranks.parallel
        step_memory = None
        if self.device.type == "cuda":
            step_memory = measure_step_memory(self, model_config)
        budget = estimate_budget(
            self.config,
            model_config,
            self.dtype,
            parallel,
            self.ranks.num_local_ranks,
            step_memory=step_memory,
        )
        # A page is the same tokens on every rank, so the one with the least room decides.
        budget = dataclasses.replace(budget, num_blocks=parallel.min(budget.num_blocks))
        self.num_kvcache_blocks = budget.num_blocks
        self.kv_cache = allocate_kv_cache(budget, self.dtype, self.device)
        self.use_kv_cache(self.kv_cache)
        return budget

    def use_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Hand each layer its slice of (2, num_layers, num_blocks, ...) pages."""
        attention_layers = [m for m in self.model.modules() if isinstance(m, Attention)]
        for layer, (k_cache, v_cache) in zip(
            attention_layers, zip(*kv_cache, strict=True), strict=True
        ):
            layer.k_cache, layer.v_cache = k_cache, v_cache

    def drop_kv_cache(self) -> None:
        """Take the pages from the layers, so that their memory is free."""
        for module in self.model.modules():
            if isinstance(module, Attention):
                module.k_cache = module.v_cache = None

    def _make_graphs(self, model_config: ModelConfig) -> None:
        self.graphs: GraphDecoder | None = None
        self.eager_reason = self.why_eager()
        if self.eager_reason is not None:
            self.observer.cudagraph_skip(self.eager_reason)
            return
        graphs = self.make_decode_graphs(model_config)
        graphs.capture()
        if self.ranks.parallel.world_size > 1:
            self.ranks.parallel.graphs += graphs.graphs.values()
        self.observer.cudagraph_capture(graphs.sizes, graphs.pool_bytes)
        self.graphs = GraphDecoder(graphs, self.ranks, self.timer, self.observer)

    def why_eager(self) -> str | None:
        """Why no graphs are used; None if they are."""
        if self.config.enforce_eager:
            return "enforce_eager"
        if self.device.type != "cuda":
            return "device_has_no_graphs"
        if self.fused is None:
            return "no_fused_kernels"
        if self.config.attention_backend == "sdpa":
            return "backend_reads_back"  # it looks at lengths on the host
        return None

    def make_decode_graphs(self, model_config: ModelConfig) -> DecodeGraphs:
        """The buffers of decode steps, and graphs that are not recorded yet."""
        from nanovllm.gpu import cuda_graphs  # noqa: PLC0415 - imports Triton

        if self.fused is None:
            raise RuntimeError("graphs are recorded of fused steps")
        block_size, max_model_len = self.config.kvcache_block_size, self.config.max_model_len
        buffers = cuda_graphs.DecodeBuffers(
            cuda_graphs.graph_batch_sizes(self.config.max_num_seqs)[-1],
            -(-max_model_len // block_size),
            model_config.vocab_size,
            self.dtype,
            self.device,
        )
        return cuda_graphs.DecodeGraphs(
            self.fused, self.fused.write_logits, buffers, block_size, max_model_len
        )

    # -- a step ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, batch: Batch, engine_step: int) -> None:
        """Begin to compute the batch's tokens, unless that was begun ahead. A GPU goes on alone."""
        self._logits = None
        prepare = prepare_decode if batch.phase == "decode" else prepare_prefill
        step = Step(engine_step, batch.phase, prepare(batch, self.config.kvcache_block_size))
        if self.graphs is None:
            self._logits = self._compute_eagerly(step)
        elif self.graphs.can_compute(step.inputs):
            self.graphs.launch(batch, step, step.inputs)
            self._step_stretch = self.timer.launched
        else:
            self.graphs.forget()
            self._logits = self._compute_eagerly(step)

    @torch.inference_mode()
    def token_ids(self, batch: Batch) -> list[int]:
        """Wait for what was launched; sample one token for each of `batch.sampled_seqs`.

        Raises:
            LogitsError: the logits of one have no largest finite number.
        """
        if not batch.sampled_seqs:  # an unfinished chunk: its logits mean nothing yet
            return []
        if self._logits is None and self.graphs is not None:
            return self.graphs.token_ids() or self._sample(self.graphs.logits(), batch.sampled_seqs)
        if self._logits is None:
            raise RuntimeError("token_ids() comes after launch()")
        return self._sample(self._logits, batch.sampled_seqs)

    @property
    def can_run_ahead(self) -> bool:
        """Could the next step begin now, if it were of the same batch?"""
        return self._logits is None and self.graphs is not None and self.graphs.can_run_ahead

    @torch.inference_mode()
    def run_ahead(self, batch: Batch, foresight: Foresight) -> None:
        """Begin the next step behind the one that was launched, if that can be.

        Args:
            batch: what was launched.
            foresight: what the next step will be.
        """
        if self.graphs is not None:
            self.graphs.run_ahead(batch, foresight)

    @torch.inference_mode()
    def compute(self, step: Step) -> None:
        """Compute this rank's part of a step that rank 0 has begun."""
        if self.graphs is not None and self.graphs.can_compute(step.inputs):
            self.graphs.compute(step, step.inputs)
        else:
            self._compute_eagerly(step)

    def _compute_eagerly(self, step: Step) -> torch.Tensor:
        """This rank's part of a step, kernel by kernel. Rank 0 gets the logits of the sampled."""
        inputs = step.inputs
        if isinstance(inputs, PrefillInputs):  # any number of tokens a sequence
            context = self._prefill_context(inputs)
            self.observer.prepare_prefill_tensors(inputs)
        else:
            context = self._decode_context(inputs)
            self.observer.prepare_decode_tensors(inputs)
        input_ids = self._flat_tensor(inputs.input_ids)
        positions = self._flat_tensor(inputs.positions)
        threads = threads_for(input_ids.numel(), self.largest_weight)
        with self.ranks.computing(step):
            with forward_context(context), threads, self.timer.measuring():
                logits = self.forward(input_ids, positions)
            self.ranks.parallel.await_device()
        self._step_stretch = self.timer.launched
        is_decode = step.phase == "decode"
        reason = (self.eager_reason or "batch_beyond_graphs") if is_decode else step.phase
        num_tokens = input_ids.numel()
        self.observer.run_eager(reason, num_tokens)
        return logits

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute a step kernel by kernel, inside a `forward_context`: tokens -> logits."""
        model = self.model if self.fused is None else self.fused
        return model.compute_logits(model(input_ids, positions))

    def tell_tokens(self, batch: Batch, token_ids: list[int]) -> None:
        """Say what was drawn. Apart from that, since a GPU should not wait for what is said."""
        stretch = self._step_stretch  # the tokens are here: so is the end of the GPU's work
        gpu_ns = None if stretch is None else stretch.elapsed_ns()
        if gpu_ns is not None:
            self.observer.gpu_time(gpu_ns)
        if batch.sampled_seqs:
            self.observer.sample_tokens(batch.sampled_seqs, token_ids)

    def _sample(self, logits: torch.Tensor, seqs: list[Sequence]) -> list[int]:
        """Draw on rank 0, which has the logits, and tell the ranks that go on with the tokens."""
        token_ids: list[int] = []
        found: dict[int, dict[int, float]] = {}
        if self.ranks.parallel.rank == 0:
            logits = logits.float()
            token_ids = self.sampler(logits, sampling_tensors(seqs, self.device)).tolist()
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
            slot_mapping=self._flat_tensor(inputs.slot_mapping),
            cu_seqlens_q=self._tensor(inputs.cu_seqlens_q, torch.int32),
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=inputs.max_seqlen_q,
            max_seqlen_k=inputs.max_seqlen_k,
            context_lens=cu_seqlens_k.diff(),
            block_tables=None if tables is None else self._tensor(tables, torch.int32),
            logits_indices=self._flat_tensor(inputs.logits_indices),
        )

    def _decode_context(self, inputs: DecodeInputs) -> Context:
        num_seqs = len(inputs.input_ids)
        context_lens = self._tensor(inputs.context_lens, torch.int32)
        cu_seqlens_k = torch.zeros(num_seqs + 1, dtype=torch.int32, device=self.device)
        cu_seqlens_k[1:] = context_lens.cumsum(0)
        return Context(
            phase="decode",
            slot_mapping=self._flat_tensor(inputs.slot_mapping),
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

    def _flat_tensor(self, values: list[int]) -> torch.Tensor:
        """(num_values,) int64. By way of an array, since a prefill may have many thousands."""
        if not values:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        return torch.frombuffer(array("q", values), dtype=torch.int64).to(self.device)


def sampling_tensors(seqs: list[Sequence], device: torch.device | str = "cpu") -> SamplingTensors:
    """What the sampler must know of each sequence; the position is that of the token to come."""
    params = [seq.sampling_params for seq in seqs]
    return SamplingTensors.from_lists(
        temperatures=[p.temperature for p in params],
        top_ks=[p.top_k for p in params],
        top_ps=[p.top_p for p in params],
        seeds=[seq.seed for seq in seqs],
        positions=[seq.num_tokens for seq in seqs],
        device=device,
    )
