"""The traces of ranks above 0.

    trace.jsonl          rank 0: requests, queues, blocks, and what it computed
    trace.rank1.jsonl    rank 1, the same run_id: its start, and what it computed in each step

A rank that the engine started has no requests, queues or block manager: these are on rank 0, and in
its trace. `reader.py` reads the files of all ranks together.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from typing_extensions import override

from nanovllm.parallel.torchrun import TorchrunRank
from nvtrace.files import Existing, NewFile, create_file, is_plain, move, reopen
from nvtrace.pipeline import Sink, sink_of
from nvtrace.reader import rank_path
from nvtrace.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from os import stat_result
    from pathlib import Path

    from structlog.typing import Processor

    from nanovllm.engine.kv_cache import KVBudget


class RankRecorder(Recorder):
    """The recorder of a rank that the engine started.

    Args:
        sink: where the lines go.
        rank: from 1.
        run_id: that of rank 0's trace.
        processors: see `nvtrace.recorder.record`.
    """

    def __init__(
        self, sink: Sink, rank: int, run_id: str, processors: Iterable[Processor] = ()
    ) -> None:
        super().__init__(sink, processors=processors, rank=rank)
        self.trace.run_id = run_id

    @override
    def kv_budget_estimate(self, budget: KVBudget) -> None:
        super().kv_budget_estimate(budget)
        self.trace.drain()  # `engine_ready`, which drains too, is called on rank 0 only

    @override
    def run_eager(self, reason: str, num_tokens: int) -> None:
        # This rank has no schedule event, so the phase is taken from how the model ran.
        self.trace.batch_phase = (
            "prefill" if reason == "prefill" else "mixed" if reason == "mixed" else "decode"
        )
        super().run_eager(reason, num_tokens)
        self.trace.drain()  # on this rank, the step ends here

    @override
    def cudagraph_replay(self, batch_size: int, graph_batch_size: int, *, is_ahead: bool) -> None:
        self.trace.batch_phase = "decode"
        super().cudagraph_replay(batch_size, graph_batch_size, is_ahead=is_ahead)
        self.trace.drain()


@dataclass(frozen=True, slots=True)
class RankRecipe:
    """Makes the recorder of a rank, in that rank's process.

    Attributes:
        path: of rank 0's trace.
        run_id: of rank 0's trace.
        processors: see `nvtrace.recorder.record`.
        existing: the same.
        files: the files that rank 0 has created for the others, by rank.
    """

    path: Path
    run_id: str
    processors: tuple[Processor, ...]
    existing: Existing
    files: dict[int, tuple[Path, stat_result]] = field(default_factory=dict)

    def make(self, num_ranks: int, beside: Path) -> Iterator[NewFile]:
        """Create the other ranks' files in rank 0's process, which can undo it.

        Args:
            num_ranks: of the engine.
            beside: where rank 0's trace is now; another run may have renamed it.
        """
        for rank in range(1, num_ranks):
            made = create_file(rank_path(beside, rank), self.existing)
            if made.path is not None:
                self.files[rank] = made.path, os.fstat(made.file.fileno())
            yield made

    def __call__(self, rank: int) -> RankRecorder:
        """Open the rank's file."""
        path = rank_path(self.path, rank)
        made = reopen(*self.files[rank]) if rank in self.files else None
        sink = sink_of(create_file(path, self.existing) if made is None else made, path)
        return RankRecorder(sink, rank, self.run_id, self.processors)


def keep_ranks(path: Path, kept: Path) -> list[tuple[Path, Path]]:
    """After rank 0's old trace was renamed from `path` to `kept`, rename those of the other ranks.

    A file whose new name is in use is not renamed.

    Returns:
        (old, new) name of each renamed file.
    """
    renamed: list[tuple[Path, Path]] = []
    for rank in count(1):
        old = rank_path(path, rank)
        new = move(old, [rank_path(kept, rank)], is_plain)
        if new is None:
            break
        renamed.append((old, new))
    return renamed


def shared_run_id(run_id: str, world_size: int) -> str:
    """Return the same run_id on all ranks that torchrun started."""
    torchrun = TorchrunRank.from_environment(os.environ)
    if torchrun is None or torchrun.world_size == 1 or torchrun.world_size != world_size:
        return run_id
    from nanovllm.parallel.ranks import share  # noqa: PLC0415 - loads torch, as the engine does then

    return share("nvtrace/run_id", run_id)
