"""GraphDecoder: how a decode step goes by way of a CUDA graph, with all that belongs to it.

    launch       find that it was launched ahead; or load the batch, tell the other ranks, replay
    run_ahead    give the GPU the next step too, behind this one
    token_ids    wait for this one

Knows the graphs, the ranks and the timer. Does not know how the eager way goes (`model_runner.py`)
nor what is in a graph (`cuda_graphs.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from nanovllm.engine.model_inputs import DecodeInputs
from nanovllm.layers.sampler import broken_logits

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.engine.batch import Batch, Foresight
    from nanovllm.engine.model_inputs import PrefillInputs, Step
    from nanovllm.engine.sequence import Sequence
    from nanovllm.gpu.cuda_graphs import DecodeGraphs, Launched
    from nanovllm.gpu.timer import GpuTimer
    from nanovllm.observer import Observer
    from nanovllm.parallel.ranks import Ranks


class GraphDecoder:
    """The decode steps of a runner that has graphs.

    Args:
        graphs: recorded.
        ranks: who computes along.
        timer: of the GPU.
        observer: told how each step went.
    """

    def __init__(
        self, graphs: DecodeGraphs, ranks: Ranks, timer: GpuTimer, observer: Observer
    ) -> None:
        self.graphs = graphs
        self.ranks = ranks
        self.timer = timer
        self.observer = observer
        self._launched: Launched | None = None  # the step under way
        self._is_drawn = False  # does it draw its tokens by itself?

    def can_compute(self, inputs: PrefillInputs | DecodeInputs) -> TypeGuard[DecodeInputs]:
        """Is it a decode, and is there a graph that holds so many rows?"""
        is_decode = isinstance(inputs, DecodeInputs)
        return is_decode and self.graphs.size_for(len(inputs.input_ids)) is not None

    def launch(self, batch: Batch, step: Step, inputs: DecodeInputs) -> None:
        """Begin a decode step that a graph holds, unless it was begun ahead."""
        self._launched = self.graphs.take_ahead(batch.seqs)
        if self._launched is None:
            self.graphs.load_sampling(batch.seqs)
            self._launched = self.compute(step, inputs)
        else:  # the GPU is at work already
            batch_size, size = len(batch.seqs), self._launched.size
            self.observer.prepare_decode_tensors(inputs)
            self.observer.cudagraph_replay(batch_size, size, is_ahead=True)
        self._is_drawn = all(map(is_sampled_in_graph, batch.seqs))

    def compute(self, step: Step, inputs: DecodeInputs) -> Launched:
        """Load a batch and replay its graph, with all ranks."""
        batch_size = len(inputs.input_ids)
        size = self.graphs.size_for(batch_size)
        if size is None:
            raise RuntimeError(f"no graph holds {batch_size} rows")
        self.graphs.load(inputs, size)
        self.observer.prepare_decode_tensors(inputs)
        with self.ranks.computing(step):
            with self.timer.next_stretch() as stretch:
                launched = self.graphs.replay(size, list(range(batch_size)), stretch.last)
            self.ranks.parallel.await_device()
        self.observer.cudagraph_replay(batch_size, size, is_ahead=False)
        return launched

    def token_ids(self) -> list[int]:
        """Wait for the tokens of the step under way; none if somebody must see the logits first.

        Raises:
            LogitsError: the logits of a row have no largest finite number.
        """
        if not self._is_drawn:
            return []
        token_ids = self._under_way().token_ids()
        if min(token_ids) < 0:
            raise broken_logits(token_ids.index(-1))
        return self.ranks.agree(token_ids)

    def logits(self) -> Tensor:
        """The logits of the step under way, (num_seqs, vocab_size)."""
        return self.graphs.logits(self._under_way())

    @property
    def can_run_ahead(self) -> bool:
        """Could the next step begin now, if it were of the same batch?"""
        is_alone = self.ranks.parallel.world_size == 1
        return self._launched is not None and self._is_drawn and is_alone

    def run_ahead(self, batch: Batch, foresight: Foresight) -> None:
        """Begin the next step behind the one under way, if the same graph will do."""
        launched, num_seqs = self._launched, len(batch.seqs) - len(foresight.ending)
        if launched is None or self.graphs.size_for(num_seqs) != launched.size:
            return
        with self.timer.next_stretch() as stretch:
            self.graphs.run_ahead(batch.seqs, foresight, launched, stretch.last)

    def forget(self) -> None:
        """A step of another kind comes in between."""
        self._launched = None
        self.graphs.forget()

    def _under_way(self) -> Launched:
        if self._launched is None:
            raise RuntimeError("no step was launched")
        return self._launched


def is_sampled_in_graph(seq: Sequence) -> bool:
    """Can a graph draw this sequence's tokens, without anybody seeing the logits?"""
    params = seq.sampling_params
    is_cut = params.temperature > 0 and (bool(params.top_k) or params.top_p < 1)
    return not is_cut and params.logprobs is None
