"""DecodeGraphs: a whole decode step as one launch, from the last tokens to the next ones.

A decode step is two to three hundred kernels, and the CPU needs longer to launch them one by one
than the GPU needs to run them. A CUDA graph is captured once and then launched as a whole. It
always uses the same memory, so its inputs are in fixed tensors, and each batch is copied into them:

                        graph of 4 rows, batch of 3          row 3 is padding: position -1
        input_ids       [  t0    t1    t2    -  ]
        positions       [  18    40     7   -1  ]
        block_tables    [  ..    ..    ..    .. ]
              │
              v   slots, context lengths, noise keys   (derive_inputs)
              v   28 layers, head                      (the model)
              v   sampling                             (sample)
        token_ids       [  u0    u1    u2    -  ]  ──> to the CPU
              │
              └──> input_ids, and positions + 1: ready for the same batch's next token

A graph is captured for one number of rows; a batch uses the smallest one that holds it. If the next
step is predicted to be the same batch, or what is left of it, it is launched before the tokens of
this step are known (`run_ahead.py`). Only new blocks and ended rows are copied for it:

    GPU    |      step n      |    step n + 1    |
    host    L waits ..........| ends n, begins n + 1, L waits ...     L: launches the next

If another batch is scheduled, the result of the launched step is discarded: its keys and values are
in slots that no sequence uses yet, or that get the same values again. If only some of its sequences
ended unexpectedly, the rows of the others are used.

vLLM's counterpart is `vllm/v1/worker/gpu/model_runner.py`, `capture_model`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeGuard

import torch

from nanovllm.engine.core import Launched
from nanovllm.engine.model_inputs import DecodeInputs, prepare_decode
from nanovllm.gpu.timer import GPUTimer
from nanovllm.layers.context import Context, forward_context
from nanovllm.layers.sampler import FLOAT32, broken_logits

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from nanovllm.config import Config
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.model_inputs import PrefillInputs, Step
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.engine.sequence import Sequence
    from nanovllm.gpu.qwen3_fused import FusedQwen3
    from nanovllm.gpu.run_ahead import NextStep
    from nanovllm.observer import Observer
    from nanovllm.parallel.ranks import Ranks
    from nanovllm.utils.model_config import ModelConfig

# Multiples of 16, the rows of a tensor core's tile, so that padding costs little. From 512 on
# multiples of 64, because each graph takes time and memory at the start.
SIZES = (1, 2, 4, 8, *range(16, 512, 16), *range(512, 2049, 64))


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows to capture graphs for, ascending; the last holds `max_num_seqs`.

    A step of more than 2,048 sequences is launched kernel by kernel.
    """
    limit = min(max_num_seqs, SIZES[-1])
    return [*(size for size in SIZES if size < limit), limit]


def smallest_that_holds(batch_size: int, sizes: list[int]) -> int | None:
    """Return the first of these ascending sizes that is at least `batch_size`; None if none is."""
    index = bisect_left(sizes, batch_size)
    return sizes[index] if index < len(sizes) else None


class DecodeBuffers:
    """The inputs and outputs of the graphs. One row for each sequence.

    Attributes:
        input_ids: (num_rows,) int64, the token to compute.
        positions: (num_rows,) int64, its position; -1 in a row that is padding.
        block_tables: (num_rows, max_num_blocks) int32.
        seeds: (num_rows,) int64, the 64 bits of each request's seed.
        temperatures: (num_rows,) float32.
        token_ids: (num_rows,) int64, the sampled tokens; -1 where the logits were not finite.
        logits: (num_rows, vocab_size), in the model's dtype.
    """

    def __init__(
        self,
        num_rows: int,
        max_num_blocks: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def on_device(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.input_ids = on_device(num_rows)
        self.positions = on_device(num_rows) - 1
        self.block_tables = on_device(num_rows, max_num_blocks, dtype=torch.int32)
        self.seeds = on_device(num_rows)
        self.temperatures = on_device(num_rows, dtype=torch.float32)
        self.token_ids = on_device(num_rows)
        self.no_token = on_device(1) - 1
        self.logits = on_device(num_rows, vocab_size, dtype=dtype)
        # Filled by derive_inputs.
        self.rope_positions = on_device(num_rows)
        self.slot_mapping = on_device(num_rows)
        self.context_lens = on_device(num_rows, dtype=torch.int32)
        self.is_greedy = on_device(num_rows, dtype=torch.bool)
        # In pinned memory, so that copies are asynchronous.
        pin = device.type == "cuda"
        shape = (num_rows, max_num_blocks)
        self.host_tables = torch.zeros(shape, dtype=torch.int32, pin_memory=pin)
        self.host_token_ids = torch.zeros((2, num_rows), dtype=torch.int64, pin_memory=pin)

    def load_sampling(self, seqs: list[Sequence]) -> None:
        """Copy temperatures and seeds of `seqs` into the first rows."""
        temperatures = [seq.sampling_params.temperature for seq in seqs]
        # In float32 a tiny temperature would be 0, which means greedy.
        _copy("f", [t and max(t, FLOAT32.tiny) for t in temperatures], self.temperatures)
        _copy("Q", [seq.seed % 2**64 for seq in seqs], self.seeds)


@dataclass(slots=True, eq=False)
class GraphStep(Launched):
    """A decode step that was launched as one graph.

    Attributes:
        graphs: all graphs of the engine.
        seqs: the batch.
        places: the row of each sequence, in the batch's order.
        size: number of rows of the graph.
        timer: of the step on the GPU; when it has ended, the tokens are on the host.
        host_token_ids: (size,), -1 in a row whose logits were not finite.
        predicted: the prediction, if the step was launched ahead.
        is_sampled: does the graph sample the tokens of all sequences?
    """

    graphs: DecodeGraphs
    seqs: list[Sequence]
    places: list[int]
    size: int
    timer: GPUTimer
    host_token_ids: Tensor
    predicted: NextStep | None = None
    is_sampled: bool = True

    @property
    def can_be_followed(self) -> bool:
        """See Launched."""
        return self.is_sampled and self.graphs.ranks.parallel.world_size == 1

    def token_ids(self) -> list[int]:
        """See Launched.

        Raises:
            LogitsError: a row of the logits has no finite maximum.
        """
        if not self.is_sampled:
            return self.graphs.sample(self.graphs.logits(self.places), self.seqs)
        self.timer.end.synchronize()
        by_row: list[int] = self.host_token_ids.tolist()
        token_ids = [by_row[place] for place in self.places]
        if min(token_ids) < 0:
            raise broken_logits(token_ids.index(-1))
        return self.graphs.ranks.agree(token_ids)

    def gpu_ns(self) -> int | None:
        """See Launched."""
        return self.timer.elapsed_ns()

    def launch_next(self, next_step: NextStep) -> GraphStep | None:
        """See Launched. Possible only if the next step uses the same graph."""
        return self.graphs.launch_next(self, next_step)

    def is_step_of(self, batch: Batch) -> bool:
        """See Launched. A row whose sequence ended unexpectedly becomes padding."""
        rows = None if self.predicted is None else self.predicted.rows_of(batch)
        if rows is None:
            return False
        places = [self.places[row] for row in rows]
        self.graphs.clear(sorted({*self.places} - {*places}))
        self.seqs, self.places = batch.seqs, places
        self.graphs.report_ahead(batch, self.size)
        return True


class DecodeGraphs:
    """Decode steps as graphs.

    Args:
        model: computes a step, inside a `forward_context`.
        config: the engine's settings, resolved.
        vocab_size: the model's.
        ranks: the processes that compute each step together.
        sample: (logits, sequences) -> tokens, for sequences that a graph cannot sample.
        observer: called for each step.
    """

    def __init__(
        self,
        model: FusedQwen3,
        config: Config,
        vocab_size: int,
        ranks: Ranks,
        sample: Callable[[Tensor, list[Sequence]], list[int]],
        *,
        observer: Observer,
    ) -> None:
        self.model = model
        self.block_size = config.kvcache_block_size
        self.max_model_len = config.max_model_len
        self.ranks = ranks
        self.observer = observer
        self.sample = sample
        self.sizes = graph_batch_sizes(config.max_num_seqs)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool_bytes = 0
        self.buffers = DecodeBuffers(
            self.sizes[-1],
            -(-self.max_model_len // self.block_size),
            vocab_size,
            getattr(torch, config.dtype),
            ranks.parallel.device,
        )
        # Two steps can be in progress: the one that is waited for, and the next one.
        self._hosts = list(self.buffers.host_token_ids)
        self._timers = [GPUTimer(), GPUTimer()]
        self._tables_are_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    # -- start -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a graph for each size, the largest first: the others reuse its memory."""
        free_before = torch.cuda.mem_get_info()[0]
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            self.run(size)  # compiles kernels and creates handles, which a capture must not do
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self.run(size)
            self.graphs[size] = graph
        torch.cuda.synchronize()
        self.pool_bytes = free_before - torch.cuda.mem_get_info()[0]
        if self.ranks.parallel.world_size > 1:
            self.ranks.parallel.graphs += self.graphs.values()

    def run(self, size: int) -> None:
        """Compute a step of `size` rows, kernel by kernel. This is what a graph captures."""
        # Imported here, so that the rest of this module can be tested without Triton.
        from nanovllm.gpu.kernels.decode_inputs import derive_inputs  # noqa: PLC0415
        from nanovllm.gpu.kernels.sampler import sample  # noqa: PLC0415

        rows = self.buffers
        positions = rows.positions[:size]
        slot_mapping, context_lens = rows.slot_mapping[:size], rows.context_lens[:size]
        block_tables = rows.block_tables[:size]
        noise_keys = torch.empty((2, size), dtype=torch.int64, device=positions.device)
        derive_inputs(
            *(positions, block_tables, rows.seeds[:size], rows.temperatures[:size]),
            *(rows.rope_positions[:size], slot_mapping, context_lens),
            *(noise_keys, rows.is_greedy[:size]),
            block_size=self.block_size,
        )
        context = Context(
            phase="decode",
            slot_mapping=slot_mapping,
            cu_seqlens_q=slot_mapping,  # not used: in a decode, backends that can be captured
            cu_seqlens_k=slot_mapping,  # use context_lens
            max_seqlen_q=1,
            max_seqlen_k=self.max_model_len,
            context_lens=context_lens,
            block_tables=block_tables,
            logits_indices=None,
        )
        with forward_context(context):
            hidden = self.model(rows.input_ids[:size], rows.rope_positions[:size])
            logits = rows.logits[:size]
            self.model.write_logits(hidden, logits)
        token_ids, is_finite = sample(
            logits, rows.temperatures[:size], rows.is_greedy[:size], noise_keys
        )
        # A token from broken logits may be invalid, and the next step may start before the host
        # knows it: use token 0 there.
        rows.input_ids[:size] = token_ids * is_finite
        positions += positions >= 0
        rows.token_ids[:size] = torch.where(is_finite, token_ids, rows.no_token)

    # -- a step ----------------------------------------------------------------------------------

    def can_compute(self, inputs: PrefillInputs | DecodeInputs) -> TypeGuard[DecodeInputs]:
        """Are these the inputs of a decode, and is there a graph with enough rows?"""
        is_decode = isinstance(inputs, DecodeInputs)
        return is_decode and self.size_for(len(inputs.input_ids)) is not None

    def size_for(self, batch_size: int) -> int | None:
        """The size of the smallest graph that holds so many rows; None if there is none."""
        return smallest_that_holds(batch_size, self.sizes)

    def launch(self, batch: Batch, step: Step, inputs: DecodeInputs) -> GraphStep:
        """Launch a step on rank 0, which samples."""
        self.buffers.load_sampling(batch.seqs)
        places, is_sampled = list(range(len(batch.seqs))), all(map(is_sampled_in_graph, batch.seqs))
        launched = self.compute(step, inputs)
        return GraphStep(self, batch.seqs, places, *launched, is_sampled=is_sampled)

    def compute(self, step: Step, inputs: DecodeInputs) -> tuple[int, GPUTimer, Tensor]:
        """Load a batch and replay its graph, with all ranks.

        Returns:
            The graph's size, the step's timer, and the host tensor that its tokens are copied to.
        """
        batch_size = len(inputs.input_ids)
        size = self.size_for(batch_size)
        if size is None:
            raise RuntimeError(f"no graph holds {batch_size} rows")
        self._load(inputs, size)
        self.observer.prepare_decode_tensors(inputs)
        with self.ranks.computing(step):
            launched = self._replay(size)
            self.ranks.parallel.await_device()
        self.observer.cudagraph_replay(batch_size, size, is_ahead=False)
        return size, *launched

    @torch.inference_mode()
    def launch_next(self, step: GraphStep, next_step: NextStep) -> GraphStep | None:
        """Launch the next step after `step`, if it uses the same graph.

        The rows of sequences that end become padding; the others keep their rows.
        """
        seqs, places, size = step.seqs, step.places, step.size
        if self.size_for(len(next_step.seqs)) != size:
            return None
        for index, block_id in next_step.new_blocks:
            self.buffers.host_tables[places[index], len(seqs[index].block_table)] = block_id
        if next_step.new_blocks:
            self._copy_tables(places[-1] + 1)
        self.clear([places[index] for index in next_step.ending])
        places = [places[index] for index in next_step.continuing]
        return GraphStep(self, next_step.seqs, places, size, *self._replay(size), next_step)

    def report_ahead(self, batch: Batch, size: int) -> None:
        """Tell the observer that the step of this batch was launched ahead."""
        inputs, batch_size = prepare_decode(batch, self.block_size), len(batch.seqs)
        self.observer.prepare_decode_tensors(inputs)
        self.observer.cudagraph_replay(batch_size, size, is_ahead=True)

    def logits(self, places: list[int]) -> Tensor:
        """The logits of these rows of the last step, (num_rows, vocab_size)."""
        rows = torch.tensor(places, device=self.buffers.logits.device)
        return self.buffers.logits.index_select(0, rows)

    @torch.inference_mode()
    def clear(self, places: list[int]) -> None:
        """Make these rows padding, from the next step on."""
        for place in places:
            self.buffers.positions[place] = -1

    # -- inside ----------------------------------------------------------------------------------

    def _load(self, inputs: DecodeInputs, size: int) -> None:
        """Copy a batch into the buffers. The rows after it, up to `size`, become padding."""
        rows, num_seqs = self.buffers, len(inputs.input_ids)
        num_padding = size - num_seqs
        _copy("q", inputs.input_ids + [0] * num_padding, rows.input_ids)
        _copy("q", inputs.positions + [-1] * num_padding, rows.positions)
        width = len(inputs.block_tables[0])
        blocks = torch.frombuffer(array("i", chain(*inputs.block_tables)), dtype=torch.int32)
        self._tables_are_copied.synchronize()  # the last copy may still read the host tables
        rows.host_tables[:num_seqs, :width] = blocks.view(num_seqs, width)
        self._copy_tables(num_seqs)

    def _replay(self, size: int) -> tuple[GPUTimer, Tensor]:
        """Launch the step in the buffers. Returns its timer and its tokens, without waiting."""
        self._timers.reverse()
        self._hosts.reverse()
        host_token_ids = self._hosts[0][:size]
        with self._timers[0] as timer:
            self.graphs[size].replay()
            host_token_ids.copy_(self.buffers.token_ids[:size], non_blocking=True)
        return timer, host_token_ids

    def _copy_tables(self, num_seqs: int) -> None:
        rows = self.buffers
        rows.block_tables[:num_seqs].copy_(rows.host_tables[:num_seqs], non_blocking=True)
        self._tables_are_copied.record()


def make_decode_graphs(runner: ModelRunner, model_config: ModelConfig) -> DecodeGraphs:
    """The graphs of a runner's decode steps, not captured yet."""
    if runner.fused is None:
        raise RuntimeError("only fused steps can be captured as graphs")
    return DecodeGraphs(
        *(runner.fused, runner.config, model_config.vocab_size, runner.ranks, runner.sample),
        observer=runner.observer,
    )


def capture_graphs(
    runner: ModelRunner, model_config: ModelConfig
) -> tuple[DecodeGraphs | None, str | None]:
    """Capture a runner's decode steps, if that is possible. All ranks do it together.

    Returns:
        The graphs, or None and the reason.
    """
    reason = why_no_graphs(runner.config, is_fused=runner.fused is not None)
    if reason is not None:
        runner.observer.cudagraph_skip(reason)
        return None, reason
    graphs = make_decode_graphs(runner, model_config)
    with runner.ranks.starting():
        graphs.capture()
    runner.observer.cudagraph_capture(graphs.sizes, graphs.pool_bytes)
    return graphs, None


def why_no_graphs(config: Config, *, is_fused: bool) -> str | None:
    """Why decode steps are not captured; None if they are."""
    if config.enforce_eager:
        return "enforce_eager"
    if config.device != "cuda":
        return "device_has_no_graphs"
    if not is_fused:
        return "no_fused_kernels"
    if config.attention_backend == "sdpa":
        return "backend_reads_back"  # it copies lengths to the host
    return None


def is_sampled_in_graph(seq: Sequence) -> bool:
    """Can a graph sample this sequence's tokens? Not with top-k, top-p or logprobs."""
    params = seq.sampling_params
    return not params.is_filtered and params.logprobs is None


def _copy(typecode: str, values: list[int] | list[float], destination: Tensor) -> None:
    """Copy numbers to the beginning of a tensor, through an array, which is faster."""
    source = torch.frombuffer(array(typecode, values), dtype=destination.dtype)  # the same bits
    destination[: len(values)].copy_(source)
