"""TensorParallel: one process's place among those that share a model, and how they add up.

Every rank holds a part of each large matrix and computes a part of each product (Megatron-LM's
scheme, with vLLM's names). Two ranks, one layer:

                       rank 0                      rank 1
    qkv_proj     heads 0 .. H/2 - 1          heads H/2 .. H - 1       split by rows (output)
    attention    its own heads, its own KV pages: nothing to say
    o_proj       the columns that take       the columns that take    split by columns (input)
                 those heads                 those heads
                       └──────── all_reduce: the sum of both ────────┘
    gate_up_proj, down_proj                                           the same, by intermediate_size

So a layer costs two sums. The embedding and the head are split by vocabulary.

On GPUs a collective is one more kernel in the queue: that a rank is gone shows when the queue comes
to no end (`await_device`), not when the collective is called.

Knows which part is whose, and the collectives (torch.distributed: gloo on CPUs, NCCL on GPUs).
A group belongs to its engine: nothing is registered globally, and two engines do not meet. Does
not know how processes start and end (`parallel/ranks.py`, `parallel/worker_group.py`).
"""

from __future__ import annotations

import ctypes
import os
import pickle
import socket
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed

from nanovllm.errors import ContactLostError
from nanovllm.utils.global_state import keep_global_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Device type -> what torch.distributed calls the library that connects such devices."""

START_TIMEOUT = 300.0
"""Seconds that ranks may be apart while they start: loading weights takes as long as it takes."""

_NUM_QUICK_LOOKS = 5000  # some milliseconds: a step is over by then, or takes so long anyway
_SECONDS_BETWEEN_LOOKS = 0.001
_NEVER = threading.Event()  # to wait without a clock
_SECONDS_TO_ABORT = 5.0


@dataclass(frozen=True, slots=True)
class Partition:
    """The part of a checkpoint's tensor that one rank holds.

                 begin    begin + size
        dim  ------|============|--------| whole

    Attributes:
        dim: the dimension that is split.
        begin: the first index that the rank holds.
        size: how many it holds. The last ranks' part may reach past `whole`: padding.
        whole: the length of that dimension in the checkpoint.
    """

    dim: int
    begin: int
    size: int
    whole: int

    @property
    def num_stored(self) -> int:
        """How many of the `size` are in the checkpoint; the others are padding."""
        return max(0, min(self.size, self.whole - self.begin))


@dataclass(slots=True, eq=False)
class TensorParallel:
    """A rank among `world_size`, which say the same things in the same order.

    Attributes:
        rank: this process's number; rank 0 samples.
        world_size: how many there are.
        device: where the tensors are that the collectives are given.
        backend: "gloo" or "nccl"; None in a world of one.
        group: torch's process group of that backend; None in a world of one, and once closed.
        timeout: seconds that a collective may wait for the slowest rank.
        owner: the process that joined the group. A fork of it has the group, but not its threads.
        graphs: the CUDA graphs in which collectives are recorded. NCCL ends after them.
        is_any_gone: has the process of another rank ended? None if nobody here can know.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    backend: str | None = None
    group: Any = None  # torch's classes for it have no common base that is public
    timeout: float = START_TIMEOUT
    owner: int = field(default_factory=os.getpid)
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    is_any_gone: Callable[[], bool] | None = None

    # -- who holds what --------------------------------------------------------------------------

    def split(self, dim: int, whole: int) -> Partition:
        """An equal part; the last ranks' is filled up with padding where it does not come out."""
        size = -(-whole // self.world_size)
        return Partition(dim, self.rank * size, size, whole)

    def split_heads(self, num_heads: int, head_dim: int) -> Partition:
        """The rows of this rank's attention heads.

        Fewer (KV) heads than ranks are replicated: of 2 KV heads over 4 ranks, ranks 0 and 1 hold
        the first and ranks 2 and 3 the second, the one that their query heads attend to.
        """
        first = self.rank * num_heads // self.world_size
        num_rows = self.num_heads(num_heads) * head_dim
        return Partition(0, first * head_dim, num_rows, num_heads * head_dim)

    def num_heads(self, num_heads: int) -> int:
        """How many of so many heads each rank has."""
        return max(1, num_heads // self.world_size)

    # -- collectives: every rank must call them, in the same order -------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, on every rank; in place.

        Raises (as do all collectives):
            ContactLostError: another rank is gone, or did not come in time.
        """
        if self.world_size > 1:
            self._wait_for(lambda: self.group.allreduce([x]))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Rank 0 gets (num_rows, num_columns * world_size), each rank's columns in their order.

        The others get (0, num_columns * world_size).
        """
        if self.world_size == 1:
            return x
        if x.numel() == 0:  # no rank has any: nothing is sampled in this step
            return x.new_empty(0, x.shape[-1] * self.world_size)
        parts = [torch.empty_like(x) for _ in range(self.world_size)] if self.rank == 0 else []
        options = distributed.GatherOptions()
        options.rootRank = 0
        self._wait_for(lambda: self.group.gather([parts] if parts else [], [x], options))
        return torch.cat(parts, dim=-1) if parts else x.new_empty(0, x.shape[-1] * self.world_size)

    def min(self, value: int) -> int:
        """The least of every rank's `value`. For the start: it waits START_TIMEOUT."""
        if self.world_size == 1:
            return value
        least = torch.tensor([value], device=self.device)
        options = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp(distributed.ReduceOp.MIN)
        options.timeout = timedelta(seconds=START_TIMEOUT)
        self._wait_for(lambda: self.group.allreduce([least], options))
        self.await_device(START_TIMEOUT)
        return int(least)

    def broadcast(self, value: T) -> T:
        """Rank 0's `value`, on every rank. Anything that can be pickled."""
        if self.world_size == 1:
            return value
        content = pickle.dumps(value) if self.rank == 0 else b""
        size = torch.tensor([len(content)], device=self.device)
        self._wait_for(lambda: self.group.broadcast([size]))
        self.await_device()
        data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self._wait_for(lambda: self.group.broadcast([data]))
        self.await_device()
        received: T = pickle.loads(bytes(data.tolist()))  # noqa: S301 - from rank 0 of this engine
        return received

    def await_device(self, timeout: float | None = None) -> None:
        """Wait until the GPU has done what it was given, if others take part in it.

        Args:
            timeout: seconds; by default those of the group.

        Raises:
            ContactLostError: it has not in time, or never will: a collective of its waits for
                another rank.
        """
        if self.backend != "nccl":
            return
        limit = self.timeout if timeout is None else timeout
        end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        end.record(torch.cuda.current_stream(self.device))
        if any(end.query() for _ in range(_NUM_QUICK_LOOKS)):  # type: ignore[no-untyped-call]
            return
        for _ in range(round(limit / _SECONDS_BETWEEN_LOOKS)):
            if end.query():  # type: ignore[no-untyped-call]
                return
            if self.is_any_gone is not None and self.is_any_gone():
                raise self._lost() from TimeoutError("a collective waits for a rank that has ended")
            _NEVER.wait(_SECONDS_BETWEEN_LOOKS)
        raise self._lost() from TimeoutError(f"a collective has waited for {limit:g} s")

    def close(self) -> None:
        """Leave the group. A second call does nothing.

        It must be left before Python ends: gloo's threads may still want to let go of a tensor,
        and a thread that asks for the interpreter then takes the process down with it.
        """
        if self.group is None:
            return
        is_fork = os.getpid() != self.owner
        if is_fork or (self.backend == "nccl" and not self._close_nccl()):
            # Taken apart, it would wait for its threads, perhaps for ever: it is never let go.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
        self.group = None  # gloo ends with its last reference

    def _close_nccl(self) -> bool:
        """End NCCL, which waits for every graph that it is recorded in to be gone.

        And a graph that runs is not gone before it ends, which it may never do by itself: aborting
        ends it. So both are begun at once. (Nor is it ended in good order otherwise: for that all
        ranks would have to do it at once.)

        Returns:
            Did it end in reasonable time?
        """
        graphs = list(self.graphs)
        self.graphs.clear()
        threads = [
            threading.Thread(target=self.group.abort, daemon=True),
            threading.Thread(target=_reset, args=[graphs], daemon=True),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_SECONDS_TO_ABORT)
        return not any(thread.is_alive() for thread in threads)

    def _wait_for(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise self._lost() from error

    def _lost(self) -> ContactLostError:
        return ContactLostError(f"rank {self.rank} lost contact with the others")


ALONE = TensorParallel()
"""The world of one: it has no group, and its collectives do nothing."""


def serve_store() -> tuple[Store, int]:
    """Put up a notice board, for the ranks of this machine to find each other, and nobody else.

    Returns:
        The board, and the port at which it is served: whichever was free.
    """
    server = socket.create_server(("127.0.0.1", 0))  # bound here: TCPStore's own is open to all
    port: int = server.getsockname()[1]
    return _tcp_store(port, is_master=True, master_listen_fd=server.detach()), port


def join_store(port: int) -> Store:
    """Read and write the notice board at a port of this machine."""
    return _tcp_store(port, is_master=False)


def _tcp_store(port: int, **options: int) -> Store:
    tcp: Any = distributed  # whose stub hides TCPStore
    store: Store = tcp.TCPStore(
        "127.0.0.1",
        port,
        timeout=timedelta(seconds=START_TIMEOUT),
        wait_for_workers=False,
        use_libuv=False,  # in some versions it cannot listen at a given socket
        **options,
    )
    return store


def connect(
    store: Store,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: float,
    *,
    is_one_machine: bool,
) -> TensorParallel:
    """Meet the other ranks.

    Args:
        store: the ranks' common notice board, for this engine alone.
        rank: this process's number.
        world_size: how many there are.
        device: what it computes on.
        timeout: seconds that a collective may wait for the slowest rank.
        is_one_machine: talk over the loopback interface, whatever the machine's name resolves to.

    Raises:
        ContactLostError: another rank is gone, or did not come in time.
    """
    backend = BACKENDS[device.type]
    try:
        if backend == "nccl":
            group: Any = _nccl_group(store, rank, world_size)
        else:
            group = _gloo_group(store, rank, world_size, timeout, is_one_machine=is_one_machine)
    except RuntimeError as error:
        raise ContactLostError(f"rank {rank} did not connect to the others") from error
    return TensorParallel(rank, world_size, device, backend, group, timeout)


def _gloo_group(
    store: Store, rank: int, world_size: int, timeout: float, *, is_one_machine: bool
) -> distributed.ProcessGroupGloo:
    if not is_one_machine:  # the interface of the machine's name, or that of GLOO_SOCKET_IFNAME
        return distributed.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout))
    gloo: Any = distributed.ProcessGroupGloo  # its stub knows no options
    options = gloo._Options()  # noqa: SLF001 - torch 2.6 has no public name for it
    options._timeout = timedelta(seconds=timeout)  # noqa: SLF001 - the same
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001 - the same
    group: distributed.ProcessGroupGloo = gloo(store, rank, world_size, options)
    return group


def _nccl_group(store: Store, rank: int, world_size: int) -> Any:  # noqa: ANN401 - a CPU build of torch has no such class
    nccl: Any = distributed.ProcessGroupNCCL
    options = nccl.Options()
    # Left to itself, torch's watchdog answers a collective that waits too long by ending the whole
    # process, before anybody can say what happened. `await_device` is what watches here.
    options._timeout = timedelta(days=1)  # noqa: SLF001 - there is no public name
    with keep_global_state():
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # read when the group is made
        return nccl(store, rank, world_size, options)


def _reset(graphs: list[torch.cuda.CUDAGraph]) -> None:
    for graph in graphs:
        graph.reset()
