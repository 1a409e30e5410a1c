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

Should the next step turn out to be another one, what was launched is computed in vain: its keys and
values are written to places that are nobody's yet or get the same again, its tokens are not read.
Should only some of its rows have ended unforeseen, the others count.

Knows rows, their tensors and the graphs. Does not know why a batch is what it is, nor what the
model computes. vLLM's counterpart is `vllm/v1/worker/gpu/model_runner.py`, `capture_model`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch

from nanovllm.layers.context import Context, forward_context
from nanovllm.layers.sampler import FLOAT32

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from nanovllm.engine.batch import Foresight
    from nanovllm.engine.model_inputs import DecodeInputs
    from nanovllm.engine.sequence import Sequence

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


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the GPU has been given.

    Attributes:
        size: of its graph.
        places: the batch's rows in it, in the batch's order.
        arrival: passed when its tokens are in `host_token_ids`, (size,), -1 in a row whose logits
            were not finite.
    """

    size: int
    places: list[int]
    arrival: torch.cuda.Event
    host_token_ids: Tensor

    def token_ids(self) -> list[int]:
        """Wait for the batch's tokens."""
        self.arrival.synchronize()
        token_ids: list[int] = self.host_token_ids.tolist()
        return [token_ids[place] for place in self.places]


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step that was launched before it was scheduled: what must come true.

    Attributes:
        seqs: the sequences, in the order of their rows.
        positions: where each one's token is.
        new_pages: the page that some have been given meanwhile.
    """

    seqs: list[Sequence]
    positions: list[int]
    new_pages: dict[Sequence, int]

    def rows_of(self, seqs: list[Sequence]) -> list[int] | None:
        """Which of its sequences are `seqs`, if the others have ended; None if it is in vain."""
        rows, wanted = [], iter(seqs)
        seq = next(wanted, None)
        for row, candidate in enumerate(self.seqs):
            if candidate is seq:
                if not self._has_come_true(row):
                    return None
                rows.append(row)
                seq = next(wanted, None)
            elif candidate.finish_reason is None:
                return None
        return rows if seq is None else None

    def _has_come_true(self, row: int) -> bool:
        seq = self.seqs[row]
        page = self.new_pages.get(seq)
        is_there = page is None or seq.block_table[-1] == page
        return is_there and seq.num_computed_tokens == self.positions[row]


class DecodeGraphs:
    """Decode steps as graphs.

    Args:
        forward: (input_ids, positions) -> hidden states, inside a `forward_context`.
        compute_logits: (hidden states, tensor to write them into) -> None.
        buffers: the tensors they run on.
        block_size: tokens in a page.
        max_model_len: the longest context.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor], Tensor],
        compute_logits: Callable[[Tensor, Tensor], None],
        buffers: DecodeBuffers,
        block_size: int,
        max_model_len: int,
    ) -> None:
        self.forward = forward
        self.compute_logits = compute_logits
        self.buffers = buffers
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.sizes = graph_batch_sizes(len(buffers.positions))
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool_bytes = 0
        self._ahead: tuple[Ahead, Launched] | None = None
        # Two steps can be under way: one that is waited for, and one behind it.
        self._hosts = list(buffers.host_token_ids)
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
            hidden = self.forward(rows.input_ids[:size], rows.rope_positions[:size])
            logits = rows.logits[:size]
            self.compute_logits(hidden, logits)
        token_ids, is_finite = sample(
            logits, rows.temperatures[:size], rows.is_greedy[:size], noise_keys
        )
        # A token from broken logits may be no token at all, and the next step is under way before
        # anybody sees that it is.
        rows.input_ids[:size] = token_ids * is_finite
        positions += positions >= 0
        rows.token_ids[:size] = torch.where(is_finite, token_ids, rows.no_token)

    # -- a step ----------------------------------------------------------------------------------

    def size_for(self, batch_size: int) -> int | None:
        """The smallest graph that holds so many rows; None if there is none."""
        return smallest_that_holds(batch_size, self.sizes)

    def load(self, inputs: DecodeInputs, size: int) -> None:
        """Copy a batch into the buffers. The rows up to `size` become padding."""
        rows, num_seqs = self.buffers, len(inputs.input_ids)
        num_padding = size - num_seqs
        _copy("q", inputs.input_ids + [0] * num_padding, rows.input_ids)
        _copy("q", inputs.positions + [-1] * num_padding, rows.positions)
        width = len(inputs.block_tables[0])
        pages = torch.frombuffer(array("i", chain(*inputs.block_tables)), dtype=torch.int32)
        self._tables_are_copied.synchronize()  # those of a step in vain, which writes by them
        rows.host_tables[:num_seqs, :width] = pages.view(num_seqs, width)
        self._copy_tables(num_seqs)

    def load_sampling(self, seqs: list[Sequence]) -> None:
        """Copy how the loaded rows, which are those of `seqs`, are sampled."""
        rows = self.buffers
        temperatures = [seq.sampling_params.temperature for seq in seqs]
        # In float32 a tiny one would be 0, and 0 is greedy.
        _copy("f", [t and max(t, FLOAT32.tiny) for t in temperatures], rows.temperatures)
        _copy("Q", [seq.seed % 2**64 for seq in seqs], rows.seeds)

    def replay(self, size: int, places: list[int], arrival: torch.cuda.Event) -> Launched:
        """Launch the step that the buffers hold. Returns at once.

        Args:
            size: of the graph.
            places: the batch's rows, in its order.
            arrival: will be recorded next, behind the step.
        """
        self.graphs[size].replay()
        self._hosts.reverse()
        host_token_ids = self._hosts[0][:size]
        host_token_ids.copy_(self.buffers.token_ids[:size], non_blocking=True)
        return Launched(size, places, arrival, host_token_ids)

    def logits(self, launched: Launched) -> Tensor:
        """The logits of the step that was launched last, (num_seqs, vocab_size)."""
        rows = torch.tensor(launched.places, device=self.buffers.logits.device)
        return self.buffers.logits.index_select(0, rows)

    @torch.inference_mode()
    def run_ahead(
        self,
        seqs: list[Sequence],
        foresight: Foresight,
        launched: Launched,
        arrival: torch.cuda.Event,
    ) -> None:
        """Launch the next step of a batch behind the one that is under way.

        The rows of sequences that end become padding where they are; the others keep their places.

        Args:
            seqs: the batch.
            foresight: what the next step will be.
            launched: the step of the batch that is under way.
            arrival: will be recorded next, behind the new step.
        """
        rows, places = self.buffers, launched.places
        for index, page in foresight.new_pages:
            rows.host_tables[places[index], len(seqs[index].block_table)] = page
        if foresight.new_pages:
            self._copy_tables(places[-1] + 1)
        kept = list(range(len(seqs)))
        self._clear([places[index] for index in foresight.ending])
        for index in reversed(foresight.ending):
            del kept[index]
        ahead = Ahead(
            [seqs[index] for index in kept],
            [seqs[index].num_computed_tokens + 1 for index in kept],
            {seqs[index]: page for index, page in foresight.new_pages},
        )
        places = [places[index] for index in kept]
        self._ahead = ahead, self.replay(launched.size, places, arrival)

    def forget(self) -> None:
        """A step of another kind comes in between: what was launched ahead is in vain."""
        self._ahead = None

    def take_ahead(self, seqs: list[Sequence]) -> Launched | None:
        """The step of exactly these, if it was launched ahead. Asked once."""
        if self._ahead is None:
            return None
        (ahead, launched), self._ahead = self._ahead, None
        rows = ahead.rows_of(seqs)
        if rows is None:
            return None
        places = [launched.places[row] for row in rows]
        if len(places) < len(launched.places):  # who ended unforeseen must not go on
            self._clear(sorted({*launched.places} - {*places}))
        return replace(launched, places=places)

    def _clear(self, places: list[int]) -> None:
        """Make rows padding, from the next step on."""
        for place in places:
            self.buffers.positions[place] = -1

    def _copy_tables(self, num_seqs: int) -> None:
        rows = self.buffers
        rows.block_tables[:num_seqs].copy_(rows.host_tables[:num_seqs], non_blocking=True)
        self._tables_are_copied.record()


def _copy(typecode: str, values: list[int] | list[float], destination: Tensor) -> None:
    """Copy numbers to the beginning of a tensor; by way of an array, which is fast to fill."""
    source = torch.frombuffer(array(typecode, values), dtype=destination.dtype)  # the same bits
    destination[: len(values)].copy_(source)
