"""DecodeGraphs: a whole decode step as one launch, from last tokens to next tokens.

A decode step is two to three hundred kernels, and the CPU needs longer to launch them one by one
than the GPU to run them. A CUDA graph is recorded once and launched as a whole. It always runs on
the same memory, so its inputs live in tensors that never move, and each batch is copied into them:

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

A graph is for one number of rows; a batch takes the smallest that holds it. Where the next step is
known to be of the same batch, or of what is left of it, it is launched behind this one, before the
host has so much as seen this one's tokens. Nothing but new pages and ended rows is copied for it:

    GPU    |      step n      |    step n + 1    |
    host    L waits ..........| ends n, begins n + 1, L waits ...     L: launches the next

If the next step turns out to be another one, the result of what was launched is not used: its keys
and values lie in slots that no sequence uses yet or that get the same values again, and its tokens
are not read. If only some of its rows have ended unforeseen, the others are used.

Knows rows, their tensors and the graphs. Does not know why a batch is what it is, nor what the
model computes. vLLM's counterpart is `vllm/v1/worker/gpu/model_runner.py`, `capture_model`.
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

# Steps of 16, the height of a tensor core's tile, so that a larger graph costs what it holds. From
# 512 on, steps of 64: each graph takes time and memory at the start.
SIZES = (1, 2, 4, 8, *range(16, 512, 16), *range(512, 2049, 64))


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows to record graphs for, ascending; the last holds `max_num_seqs`.

    Beyond 2,048 sequences a step is launched kernel by kernel.
    """
    limit = min(max_num_seqs, SIZES[-1])
    return [*(size for size in SIZES if size < limit), limit]


def smallest_that_holds(batch_size: int, sizes: list[int]) -> int | None:
    """Return the first of these ascending sizes that is not below `batch_size`; None if all are."""
    index = bisect_left(sizes, batch_size)
    return sizes[index] if index < len(sizes) else None


class DecodeBuffers:
    """The inputs of decode steps, where the graphs read them. One row a sequence.

    Attributes:
        input_ids: (num_rows,) int64, the token to compute.
        positions: (num_rows,) int64, its position; -1 in a row that is padding.
        block_tables: (num_rows, max_num_blocks) int32.
        seeds: (num_rows,) int64, the 64 bits of each request's seed.
        temperatures: (num_rows,) float32.
        token_ids: (num_rows,) int64, what was drawn; -1 where the logits were not finite.
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
        # What derive_inputs fills.
        self.rope_positions = on_device(num_rows)
        self.slot_mapping = on_device(num_rows)
        self.context_lens = on_device(num_rows, dtype=torch.int32)
        self.is_greedy = on_device(num_rows, dtype=torch.bool)
        # Page-locked, so that nobody waits for a copy.
        pin = device.type == "cuda"
        shape = (num_rows, max_num_blocks)
        self.host_tables = torch.zeros(shape, dtype=torch.int32, pin_memory=pin)
        self.host_token_ids = torch.zeros((2, num_rows), dtype=torch.int64, pin_memory=pin)

    def load_sampling(self, seqs: list[Sequence]) -> None:
        """Copy how the first rows, which are those of `seqs`, are sampled."""
        temperatures = [seq.sampling_params.temperature for seq in seqs]
        # In float32 a tiny one would be 0, and 0 is greedy.
        _copy("f", [t and max(t, FLOAT32.tiny) for t in temperatures], self.temperatures)
        _copy("Q", [seq.seed % 2**64 for seq in seqs], self.seeds)


@dataclass(slots=True, eq=False)
class GraphStep(Launched):
    """A decode step that the GPU was given as one graph.

    Attributes:
        graphs: whose graph it is.
        seqs: the batch.
        places: the row of each, in the batch's order.
        size: of the graph.
        timer: around the step on the GPU; its end is passed when the tokens are on the host.
        host_token_ids: (size,), -1 in a row whose logits were not finite.
        next_step: of a step that was launched ahead: what must come true.
        is_sampled: does each row draw its next token by itself?
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
            LogitsError: the logits of a row have no largest finite number.
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
        """See Launched. It must be of the same graph."""
        return self.graphs.launch_next(self, next_step)

    def is_step_of(self, batch: Batch) -> bool:
        """See Launched. Who ended unforeseen leaves its row; the other rows count."""
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
        ranks: who computes along.
        sample: (logits, sequences) -> tokens, for rows whose logits somebody must see.
        observer: told how each step went.
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
        # Two steps can be under way: one that is waited for, and one behind it.
        self._hosts = list(self.buffers.host_token_ids)
        self._timers = [GPUTimer(), GPUTimer()]
        self._tables_are_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    # -- start -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self) -> None:
        """Record a graph for each size, the largest first: the others fit into its memory."""
        free_before = torch.cuda.mem_get_info()[0]
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            self.run(size)  # compiles kernels and makes handles, which a recording must not
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
        """Compute a step of `size` rows, kernel by kernel: what a graph of that size records."""
        # Imported here: what else is in this module can be read and tested without Triton.
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
            cu_seqlens_q=slot_mapping,  # not read: backends that can be captured cut a decode by
            cu_seqlens_k=slot_mapping,  # its context_lens
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
        # A token from broken logits may be no token at all, and the next step is under way before
        # anybody sees that it is.
        rows.input_ids[:size] = token_ids * is_finite
        positions += positions >= 0
        rows.token_ids[:size] = torch.where(is_finite, token_ids, rows.no_token)

    # -- a step ----------------------------------------------------------------------------------

    def can_compute(self, inputs: PrefillInputs | DecodeInputs) -> TypeGuard[DecodeInputs]:
        """Is it a decode, and is there a graph that holds so many rows?"""
        is_decode = isinstance(inputs, DecodeInputs)
        return is_decode and self.size_for(len(inputs.input_ids)) is not None

    def size_for(self, batch_size: int) -> int | None:
        """The smallest graph that holds so many rows; None if there is none."""
        return smallest_that_holds(batch_size, self.sizes)

    def launch(self, batch: Batch, step: Step, inputs: DecodeInputs) -> GraphStep:
        """Begin a step of rank 0's, whose rows know how to draw."""
        self.buffers.load_sampling(batch.seqs)
        places, is_sampled = list(range(len(batch.seqs))), all(map(is_sampled_in_graph, batch.seqs))
        launched = self.compute(step, inputs)
        return GraphStep(self, batch.seqs, places, *launched, is_sampled=is_sampled)

    def compute(self, step: Step, inputs: DecodeInputs) -> tuple[int, GPUTimer, Tensor]:
        """Load a batch and replay its graph, with all ranks.

        Returns:
            The graph's size, the timer around it, and where its tokens will be.
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
        """Launch the next step behind `step`, if the same graph will do.

        The rows of sequences that end become padding where they are; the others keep their places.
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
        """Say of a batch that its step was launched ahead."""
        inputs, batch_size = prepare_decode(batch, self.block_size), len(batch.seqs)
        self.observer.prepare_decode_tensors(inputs)
        self.observer.cudagraph_replay(batch_size, size, is_ahead=True)

    def logits(self, places: list[int]) -> Tensor:
        """The logits of these rows of the last step, (num_rows, vocab_size)."""
        rows = torch.tensor(places, device=self.buffers.logits.device)
        return self.buffers.logits.index_select(0, rows)

    @torch.inference_mode()
    def clear(self, places: list[int]) -> None:
        """Make rows padding, from the next step on."""
        for place in places:
            self.buffers.positions[place] = -1

    # -- inside ----------------------------------------------------------------------------------

    def _load(self, inputs: DecodeInputs, size: int) -> None:
        """Copy a batch into the buffers. The rows up to `size` become padding."""
        rows, num_seqs = self.buffers, len(inputs.input_ids)
        num_padding = size - num_seqs
        _copy("q", inputs.input_ids + [0] * num_padding, rows.input_ids)
        _copy("q", inputs.positions + [-1] * num_padding, rows.positions)
        width = len(inputs.block_tables[0])
        blocks = torch.frombuffer(array("i", chain(*inputs.block_tables)), dtype=torch.int32)
        self._tables_are_copied.synchronize()  # a step that was launched ahead may still read them
        rows.host_tables[:num_seqs, :width] = blocks.view(num_seqs, width)
        self._copy_tables(num_seqs)

    def _replay(self, size: int) -> tuple[GPUTimer, Tensor]:
        """Launch the step that the buffers hold. Returns at once: the timer, and its tokens."""
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
    """The graphs of a runner's decode steps, not recorded yet."""
    if runner.fused is None:
        raise RuntimeError("graphs are recorded of fused steps")
    return DecodeGraphs(
        *(runner.fused, runner.config, model_config.vocab_size, runner.ranks, runner.sample),
        observer=runner.observer,
    )


def capture_graphs(
    runner: ModelRunner, model_config: ModelConfig
) -> tuple[DecodeGraphs | None, str | None]:
    """Record a runner's decode steps, if they can be. All ranks do it together.

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
    """Why decode steps are not recorded; None if they are."""
    if config.enforce_eager:
        return "enforce_eager"
    if config.device != "cuda":
        return "device_has_no_graphs"
    if not is_fused:
        return "no_fused_kernels"
    if config.attention_backend == "sdpa":
        return "backend_reads_back"  # it looks at lengths on the host
    return None


def is_sampled_in_graph(seq: Sequence) -> bool:
    """Can a graph draw this sequence's tokens, without anybody seeing the logits?"""
    params = seq.sampling_params
    return not params.is_filtered and params.logprobs is None


def _copy(typecode: str, values: list[int] | list[float], destination: Tensor) -> None:
    """Copy numbers to the beginning of a tensor; by way of an array, which is fast to fill."""
    source = torch.frombuffer(array(typecode, values), dtype=destination.dtype)  # the same bits
    destination[: len(values)].copy_(source)
