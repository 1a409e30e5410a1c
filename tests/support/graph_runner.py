"""The fake model behind the real graphs: all of their code but the kernels, on CPU tensors.

Stands in for ModelRunner as `FakeRunner` does, but decodes go through the real `DecodeGraphs`, with
their buffers, rows, tables and guesses. What a replay computes, it computes as a GPU would: from
what is in the buffers, row by row, whoever the rows belong to by now.

Knows what a recorded decode step reads and writes. Does not know how it is recorded.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from nanovllm.engine.model_inputs import Step, prepare_decode
from nanovllm.gpu.cuda_graphs import DecodeGraphs
from support.fake_runner import FAKE_MODEL, START, FakeRunner, make_engine, next_token

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.core import Launched
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.observer import Observer
    from nanovllm.parallel.ranks import Ranks
    from support.fake_runner import Settings

_NOTHING = -1  # what a slot holds that nobody has written


class _Mark:
    """In place of a CUDA event: everything is over at once."""

    def __init__(self, **_options: bool) -> None:
        pass

    def record(self) -> None:
        """Nothing is waited for."""

    def query(self) -> bool:
        """It was passed; but nothing is measured."""
        return False

    def synchronize(self) -> None:
        """Nothing is waited for."""


class _Alone:
    """In place of Ranks."""

    parallel = SimpleNamespace(world_size=1, device=torch.device("cpu"), await_device=lambda: None)

    def computing(self, _step: Step) -> Any:  # noqa: ANN401 - a context manager
        """Nobody is told."""
        return nullcontext()

    def agree(self, value: Any) -> Any:  # noqa: ANN401 - any
        """Nobody is asked."""
        return value


class _Graph:
    """In place of a CUDA graph."""

    def __init__(self, runner: GraphRunner, size: int) -> None:
        self.runner = runner
        self.size = size

    def replay(self) -> None:
        """Compute the recorded step."""
        self.runner.compute_rows(self.size)


class _Graphs(DecodeGraphs):
    """The real ones, whose steps that were launched ahead are looked at too."""

    runner: GraphRunner

    def report_ahead(self, batch: Batch, size: int) -> None:
        """See DecodeGraphs."""
        runner = self.runner
        runner.num_ahead += 1
        runner.at("scheduled", batch)
        super().report_ahead(batch, size)
        runner.check_decode(batch, prepare_decode(batch, self.block_size))
        runner.at("ran", batch)


class GraphRunner(FakeRunner):
    """Runs decodes as a GPU with graphs would.

    Attributes:
        row_states: the digest that each row came to in the last replay.
    """

    def __init__(self, config: Config, observer: Observer) -> None:
        super().__init__(config, observer)
        self.width = -(-config.max_model_len // self.block_size)
        ranks, unused = cast("Ranks", _Alone()), cast("Any", object())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "Event", _Mark)
            self.graphs = _Graphs(
                *(unused, config, FAKE_MODEL.vocab_size, ranks, unused), observer=observer
            )
        self.buffers = self.graphs.buffers
        self.graphs.runner = self
        graphs: Any = {size: _Graph(self, size) for size in self.graphs.sizes}
        self.graphs.graphs = graphs
        self.row_states = [0] * self.graphs.sizes[-1]
        self.num_replays = 0

    def compute_rows(self, size: int) -> None:
        """What a graph of `size` rows computes, from its buffers and the pages alone."""
        self.num_replays += 1
        rows, block_size = self.buffers, self.block_size
        positions, tables = rows.positions.tolist(), rows.block_tables.tolist()
        states: list[tuple[int, int]] = []
        for row, position in enumerate(positions[:size]):
            token_id = 0
            if position >= 0:
                assert position // block_size < self.width, f"row {row} is beyond its table"
                page, before = tables[row][position // block_size], position - 1
                digest = START
                if position:
                    slot = tables[row][before // block_size] * block_size + before % block_size
                    digest = self.cache.get(slot, _NOTHING)
                digest = hash((digest, int(rows.input_ids[row])))
                states.append((page * block_size + position % block_size, digest))
                self.row_states[row] = digest
                token_id = next_token(digest)
                rows.positions[row] = position + 1
            rows.input_ids[row] = rows.token_ids[row] = token_id
        self.cache.update(states)

    def launch(self, batch: Batch, engine_step: int) -> Launched:  # type: ignore[override]  # by graph
        """See ModelRunner."""
        if batch.phase == "decode":
            inputs = prepare_decode(batch, self.block_size)
            if self.graphs.can_compute(inputs):
                self.at("scheduled", batch)
                step = self.graphs.launch(batch, Step(engine_step, "decode", inputs), inputs)
                self.check_decode(batch, inputs)
                self.at("ran", batch)
                return step
        return super().launch(batch, engine_step)


def make_graph_engine(settings: Settings, observer: Observer | None = None) -> LLMEngine:
    """Build the real engine around the fake model and the real graphs."""
    return make_engine(settings, observer, GraphRunner)
