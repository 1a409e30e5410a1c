"""Ranks: the processes that share a model.

    Ranks         one process
    WorkerGroup   the engine starts the other processes and sends them each step (`worker_group.py`)
    Lockstep      torchrun starts all of them; each runs the same script and a whole engine

In lockstep every rank has its own scheduler. It is deterministic, so all ranks schedule the same
batch. Only the sampled tokens are sent, by rank 0, which has the logits.
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
    """The ranks of an engine. This class: an engine of one process.

    Attributes:
        parallel: this process's rank, and the collectives.
        num_local_ranks: how many of the ranks are on this machine.
    """

    def __init__(self, parallel: TensorParallel, num_local_ranks: int = 1) -> None:
        self.parallel = parallel
        self.num_local_ranks = num_local_ranks

    def starting(self) -> AbstractContextManager[None]:
        """A context manager for the start of the model, which all ranks do at the same time.

        Raises:
            WorkerError: a rank died, raised an error or stalled; the other workers were ended.
        """
        return nullcontext()

    def computing(self, step: Step) -> AbstractContextManager[None]:
        """A context manager for computing a step on every rank. Raises as `starting`."""
        del step  # subclasses use it
        return self.starting()

    def agree(self, value: T) -> T:
        """Return rank 0's `value`, on every rank that has a scheduler."""
        return value

    def exit(self) -> None:
        """End the processes that the engine has started. A second call does nothing."""


class Lockstep(Ranks):
    """The ranks that torchrun started, each with its own engine.

    After an exception in the middle of a step the ranks no longer agree: the engine cannot be used.
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
        """Run no more steps. The processes go on: they belong to torchrun."""
        if self._ended is None:
            self._ended = "this engine was ended by exit(); make a new LLM"
            self.parallel.close()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """See Ranks. Also for a step: the other ranks have scheduled the same one."""
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
    """The device of a rank: with GPUs, the one whose index is `local_rank`.

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
    """Wait until every rank has come. After that the shorter `distributed_timeout` is enough."""
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
    """The key-value store of all processes that torchrun started; one connection per process.

    It is cached, because it must stay open: without a torchrun agent, rank 0 serves it.
    """
    found = next(rendezvous("env://", timeout=timedelta(seconds=START_TIMEOUT)))
    store: Store = found[0]
    return store


def share(name: str, value: str) -> str:
    """Return the same text on all ranks of torchrun: the `value` of the rank that calls first.

    The nth call with a name on one rank belongs to the nth call with it on the others.
    """
    torchrun = TorchrunRank.from_environment(os.environ)
    if torchrun is None:
        return value
    store = torchrun_store()
    number = store.add(f"nanovllm/{name}/{torchrun.rank}", 1)
    agreed: bytes = store.compare_set(f"nanovllm/{name}/agreed/{number}", "", value)
    return agreed.decode()
