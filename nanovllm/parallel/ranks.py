"""Ranks: the processes that share a model, as the engine sees them.

    Ranks         one process, nobody to talk to
    WorkerGroup   the engine starts the others and tells them each step (`worker_group.py`)
    Lockstep      torchrun starts all of them; each runs the same script and the whole engine

In lock-step every rank schedules for itself, and since the scheduler has no secrets, all come to
the same batch. Only the sampled tokens are agreed on: rank 0 has the logits.

Knows which way it is, and what a step must be wrapped in. Does not know what is computed.
"""

from __future__ import annotations

import os
import weakref
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from nanovllm.errors import ContactLostError, WorkerError
from nanovllm.parallel.tensor_parallel import START_TIMEOUT, TensorParallel, connect
from nanovllm.parallel.torchrun import TorchrunRank

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch.distributed.distributed_c10d import Store

    from nanovllm.config import Config
    from nanovllm.engine.model_inputs import Step

T = TypeVar("T")


class Ranks:
    """The ranks of an engine; this class: one that is alone.

    Attributes:
        parallel: this process's place, and the collectives.
        num_local_ranks: how many of the ranks share this machine.
    """

    def __init__(self, parallel: TensorParallel, num_local_ranks: int = 1) -> None:
        self.parallel = parallel
        self.num_local_ranks = num_local_ranks

    def starting(self) -> AbstractContextManager[None]:
        """Wrap what this rank does until the model is there: the others do the same meanwhile.

        Raises:
            WorkerError: a rank died, raised or stalled; none is left running.
        """
        return nullcontext()

    def computing(self, step: Step) -> AbstractContextManager[None]:
        """Wrap the computing of a step, so that every rank computes it. Raises as `starting`."""
        del step  # for those who must be told
        return self.starting()

    def agree(self, value: T) -> T:
        """Rank 0's `value`, on every rank that goes on with it."""
        return value

    def exit(self) -> None:
        """End the other ranks, as far as they are the engine's. A second call does nothing."""


class Lockstep(Ranks):
    """The ranks that torchrun started, each with an engine of its own.

    An exception in the middle of a step leaves the ranks at different places: the engine is over.
    """

    def __init__(self, torchrun: TorchrunRank, config: Config) -> None:
        store = torchrun_store()
        number = store.add(f"nanovllm/engines/{torchrun.rank}", 1)  # this rank's nth
        store = PrefixStore(f"nanovllm/engine/{number}", store)
        _await_all(store, torchrun.world_size)
        parallel = connect(
            store,
            torchrun.rank,
            torchrun.world_size,
            rank_device(config.device, torchrun.local_rank),
            config.distributed_timeout,
            is_one_machine=torchrun.num_local_ranks == torchrun.world_size,
        )
        super().__init__(parallel, torchrun.num_local_ranks)
        self._ended: str | None = None
        weakref.finalize(self, parallel.close)

    def agree(self, value: T) -> T:
        """See Ranks."""
        with self.starting():
            return self.parallel.broadcast(value)

    def exit(self) -> None:
        """Take no more steps. The processes are torchrun's."""
        if self._ended is None:
            self._ended = "this engine was ended by exit(); make a new LLM"
            self.parallel.close()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """See Ranks. A step is no different: the other ranks have scheduled the same."""
        if self._ended is not None:
            raise WorkerError(self._ended)
        try:
            yield
        except ContactLostError as error:
            self.parallel.close()
            self._ended = (
                f"{error}: one of them ended, raised, or did not answer within "
                f"{self.parallel.timeout:g} s (distributed_timeout); see what it printed"
            )
            raise WorkerError(self._ended) from error
        except BaseException as error:
            self.parallel.close()
            self._ended = (
                f"rank {self.parallel.rank} failed within a step ({type(error).__name__}: "
                f"{error}), so the ranks no longer agree; start them all again"
            )
            raise


def rank_device(device: str, local_rank: int) -> torch.device:
    """What a rank computes on: of several GPUs, the one of its own number.

    Raises:
        ValueError: there is no such GPU.
    """
    if device != "cuda":
        return torch.device(device)
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise ValueError(
            f"rank {local_rank} of this machine has no GPU, because torch sees only {num_gpus}: "
            f"set tensor_parallel_size to {num_gpus} or less, or device='cpu'"
        )
    return torch.device(device, local_rank)


def _await_all(store: Store, world_size: int) -> None:
    """Wait until every rank has come: from then on nobody waits long."""
    try:
        if store.add("present", 1) == world_size:
            store.set("all", "present")
        store.wait(["all"], timedelta(seconds=START_TIMEOUT))
    except RuntimeError as error:
        raise WorkerError(
            f"not all {world_size} ranks made an engine within {START_TIMEOUT:g} s: {error}"
        ) from error


@cache
def torchrun_store() -> Store:
    """The notice board that all processes of a launch share; one connection for each process.

    It is kept: where no agent serves it, rank 0 does, and must go on while others read.
    """
    found = next(rendezvous("env://", timeout=timedelta(seconds=START_TIMEOUT)))
    store: Store = found[0]
    return store


def share(name: str, value: str) -> str:
    """Make the ranks of a launch agree on a text: that of the first one who comes counts.

    Each rank's nth call with a name is about the same text.
    """
    torchrun = TorchrunRank.from_environment(os.environ)
    if torchrun is None:
        return value
    store = torchrun_store()
    number = store.add(f"nanovllm/{name}/{torchrun.rank}", 1)
    agreed: bytes = store.compare_set(f"nanovllm/{name}/agreed/{number}", "", value)
    return agreed.decode()
