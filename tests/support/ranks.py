"""What the tests of tensor parallelism do to other processes, and say in them.

Everything that a worker gets must be importable there: the observers below are made in its process.
Knows processes. Does not know what an engine answers.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nanovllm import Observer
from support.cli import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nanovllm.config import Config
    from nanovllm.utils.model_config import ModelConfig

Deed = Literal["raise", "leave", "sleep", "exit", "raise at the start", "raise when made"]
PATIENCE = 60.0


class Saboteur(Observer):
    """In a worker: does something bad in one step."""

    def __init__(self, deed: Deed, step: int) -> None:
        self.deed = deed
        self.step = step

    def engine_init(self, config: Config, model_config: ModelConfig) -> None:
        """Perhaps do it now."""
        del config, model_config
        if self.deed == "raise at the start":
            raise LookupError("no good start")

    def step_start(self, engine_step: int) -> None:
        """Do it in its step."""
        if engine_step != self.step:
            return
        if self.deed == "raise":
            raise LookupError(f"no step {engine_step} for me")
        if self.deed == "leave":
            raise SystemExit(f"no step {engine_step} for me")
        if self.deed == "sleep":
            time.sleep(2 * PATIENCE)
        if self.deed == "exit":
            os._exit(7)


@dataclass(frozen=True, slots=True)
class Plot:
    """A recipe: one rank has a saboteur, the others listen to nothing."""

    rank: int
    deed: Deed
    step: int = 3

    def __call__(self, rank: int) -> Observer:
        """Make the rank's observer."""
        if self.deed == "raise when made":
            raise LookupError("no good start")
        return Saboteur(self.deed, self.step) if rank == self.rank else Observer()


@dataclass
class Chief(Observer):
    """On rank 0: hands out a recipe, and does something when a step begins.

    Attributes:
        recipe: for the workers.
        at_step: step -> what to do then.
        num_asked: how often the engine asked for the recipe.
        failures: what failed, as the engine reports it.
    """

    recipe: Callable[[int], Observer] | None = None
    at_step: dict[int, Callable[[], object]] = field(default_factory=dict)
    num_asked: int = 0
    failures: list[str] = field(default_factory=list)

    def for_workers(self) -> Callable[[int], Observer] | None:
        """Hand it out."""
        self.num_asked += 1
        return self.recipe

    def failed(self, hook: str, error: Exception) -> None:
        """Keep it."""
        self.failures.append(f"{hook}: {error}")

    def step_start(self, engine_step: int) -> None:
        """Do it."""
        self.at_step.get(engine_step, lambda: None)()


def worker_pids() -> set[int]:
    """The workers of all engines in this process."""
    workers = [p for p in multiprocessing.active_children() if "nanovllm-rank" in p.name]
    return {p.pid for p in workers if p.pid is not None}


@contextmanager
def noting_workers() -> Iterator[set[int]]:
    """Put the workers that are started in the block into a set, at its end."""
    before, started = worker_pids(), set[int]()
    yield started
    started |= worker_pids() - before


def is_running(pid: int) -> bool:
    """Is there such a process, and is it more than a zombie that nobody has fetched?"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:  # gone just now, or a system without /proc
        return not Path("/proc").is_dir()


def are_gone(pids: Iterable[int]) -> bool:
    """Wait a while for processes to end. Have they?"""
    deadline = time.monotonic() + PATIENCE
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, pids))


def start_script(file: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start a script as the first process of a group of its own, as a terminal would."""
    return subprocess.Popen(
        [sys.executable, str(file), *map(str, arguments)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
