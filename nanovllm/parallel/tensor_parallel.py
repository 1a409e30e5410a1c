"""TensorParallel: which part of the model a rank has, and the collectives between ranks.

Every rank holds a part of each large matrix and computes a part of each product (as in Megatron-LM,
with vLLM's names). Two ranks, one layer:

                       rank 0                      rank 1
    qkv_proj     heads 0 .. H/2 - 1          heads H/2 .. H - 1       split by rows (output)
    attention    its own heads, its own KV blocks: no communication
    o_proj       the columns of              the columns of           split by columns (input)
                 those heads                 those heads
                       └──────── all_reduce: the sum of both ────────┘
    gate_up_proj, down_proj                                           the same, by intermediate_size

So a layer needs two all_reduce calls. The embedding and the head are split by vocabulary.

The collectives are those of torch.distributed: gloo on CPUs, NCCL on GPUs. On GPUs a collective is
one more kernel in the stream: if another rank has ended, the call returns, but the stream never
finishes (`await_device`). The group belongs to one engine; nothing is registered globally.
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
"""Device type -> backend of torch.distributed."""

START_TIMEOUT = 300.0
"""Seconds that ranks may wait for each other during the start: loading weights can take long."""

_NUM_QUICK_LOOKS = 5000  # polls without sleeping, some milliseconds: most steps end in that time
_SECONDS_BETWEEN_LOOKS = 0.001
_NEVER = threading.Event()  # never set: wait() on it sleeps
_SECONDS_TO_ABORT = 5.0


@dataclass(frozen=True, slots=True)
class Partition:
    """The part of a checkpoint's tensor that one rank holds.

                 begin    begin + size
        dim  ------|============|--------| whole

    Attributes:
        dim: the dimension that is split.
        begin: the first index that the rank holds.
        size: how many it holds. The part of the last ranks may go past `whole`: padding.
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
    """One rank of `world_size`. All ranks call the same collectives in the same order.

    Attributes:
        rank: of this process; rank 0 samples.
        world_size: the number of ranks.
        device: of the tensors given to the collectives.
        backend: "gloo" or "nccl"; None if there is only one rank.
        group: torch's process group; None if there is only one rank, and after `close`.
        timeout: seconds that a collective may wait for the slowest rank.
        owner: id of the process that joined the group. A fork has the group, but not its threads.
        graphs: the CUDA graphs that contain collectives. NCCL can be closed only after them.
        is_any_gone: has the process of another rank ended? None if this rank cannot know.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    backend: str | None = None
    group: Any = None  # torch's classes for it have no public base class
    timeout: float = START_TIMEOUT
    owner: int = field(default_factory=os.getpid)
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    is_any_gone: Callable[[], bool] | None = None

    # -- who holds what --------------------------------------------------------------------------

    def split(self, dim: int, whole: int) -> Partition:
        """This rank's part; all are equal. If `whole` is not divisible, the last are padded."""
        size = -(-whole // self.world_size)
        return Partition(dim, self.rank * size, size, whole)

    def split_heads(self, num_heads: int, head_dim: int) -> Partition:
        """The rows of this rank's attention heads.

        If there are fewer (KV) heads than ranks, they are replicated: of 2 KV heads, ranks 0 and 1
        of 4 hold the first one and ranks 2 and 3 the second, as their query heads need it.
        """
        first = self.rank * num_heads // self.world_size
        num_rows = self.num_heads(num_heads) * head_dim
        return Partition(0, first * head_dim, num_rows, num_heads * head_dim)

    def num_heads(self, num_heads: int) -> int:
        """How many of `num_heads` heads each rank has."""
        return max(1, num_heads // self.world_size)

    # -- collectives: every rank must call them, in the same order -------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, on every rank; in place.

        Raises (as do all collectives):
            ContactLostError: another rank has ended, or did not take part in time.
        """
        if self.world_size > 1:
            self._wait_for(lambda: self.group.allreduce([x]))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Rank 0 gets (num_rows, num_columns * world_size), the columns in the order of ranks.

        The others get (0, num_columns * world_size).
        """
        if self.world_size == 1:
            return x
        if x.numel() == 0:  # on all ranks: nothing is sampled in this step
            return x.new_empty(0, x.shape[-1] * self.world_size)
        parts = [torch.empty_like(x) for _ in range(self.world_size)] if self.rank == 0 else []
        options = distributed.GatherOptions()
        options.rootRank = 0
        self._wait_for(lambda: self.group.gather([parts] if parts else [], [x], options))
        return torch.cat(parts, dim=-1) if parts else x.new_empty(0, x.shape[-1] * self.world_size)

    def min(self, value: int) -> int:
        """The minimum of every rank's `value`. For the start: it may wait START_TIMEOUT."""
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
        """Rank 0's `value`, on every rank. It must be picklable."""
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
        """With NCCL, wait until the GPU has computed everything that was launched.

        Args:
            timeout: seconds; by default those of the group.

        Raises:
            ContactLostError: a collective waits for another rank, which has ended or is too late.
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

        This must be done before Python exits: gloo's threads may still release a tensor, and a
        thread that needs the interpreter at that time crashes the process.
        """
        if self.group is None:
            return
        is_fork = os.getpid() != self.owner
        if is_fork or (self.backend == "nccl" and not self._close_nccl()):
            # Its destructor would wait for its threads, perhaps forever: keep it alive.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
        self.group = None  # gloo is closed when its last reference is gone

    def _close_nccl(self) -> bool:
        """Abort NCCL and delete the graphs that contain its collectives, at the same time.

        The abort waits until these graphs are deleted, and a graph that is running may end only
        through the abort. (An orderly shutdown is not possible: all ranks would have to take part.)

        Returns:
            Did both end in reasonable time?
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
"""A single rank: it has no group, and its collectives do nothing."""


def serve_store() -> tuple[Store, int]:
    """Serve a key-value store through which the ranks of this machine find each other.

    Returns:
        The store, and its port: any free one.
    """
    server = socket.create_server(("127.0.0.1", 0))  # TCPStore itself would listen on all addresses
    port: int = server.getsockname()[1]
    return _tcp_store(port, is_master=True, master_listen_fd=server.detach()), port


def join_store(port: int) -> Store:
    """Connect to the store at a port of this machine."""
    return _tcp_store(port, is_master=False)


def _tcp_store(port: int, **options: int) -> Store:
    tcp: Any = distributed  # its stub does not have TCPStore
    store: Store = tcp.TCPStore(
        "127.0.0.1",
        port,
        timeout=timedelta(seconds=START_TIMEOUT),
        wait_for_workers=False,
        use_libuv=False,  # some versions of it cannot use an existing socket
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
    """Connect to the other ranks.

    Args:
        store: a store of all ranks, for this engine only.
        rank: of this process.
        world_size: the number of ranks.
        device: of this rank.
        timeout: seconds that a collective may wait for the slowest rank.
        is_one_machine: use the loopback interface, and not that of the machine's name.

    Raises:
        ContactLostError: another rank has ended, or did not connect in time.
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
    if not is_one_machine:  # on the interface of the machine's name, or of GLOO_SOCKET_IFNAME
        return distributed.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout))
    gloo: Any = distributed.ProcessGroupGloo  # its stub has no options
    options = gloo._Options()  # noqa: SLF001 - torch 2.6 has no public name for it
    options._timeout = timedelta(seconds=timeout)  # noqa: SLF001 - the same
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001 - the same
    group: distributed.ProcessGroupGloo = gloo(store, rank, world_size, options)
    return group


def _nccl_group(store: Store, rank: int, world_size: int) -> Any:  # noqa: ANN401 - a CPU build of torch has no such class
    nccl: Any = distributed.ProcessGroupNCCL
    options = nccl.Options()
    # If a collective waits too long, torch's watchdog ends the whole process without a useful
    # message. So it is turned off; `await_device` watches the collectives instead.
    options._timeout = timedelta(days=1)  # noqa: SLF001 - there is no public name
    with keep_global_state():
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # read when the group is made
        return nccl(store, rank, world_size, options)


def _reset(graphs: list[torch.cuda.CUDAGraph]) -> None:
    for graph in graphs:
        graph.reset()
