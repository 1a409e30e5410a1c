"""WorkerGroup: on rank 0, the processes that it started for the other ranks.

If anything goes wrong with one of them, a WorkerError says which one and why, within
`distributed_timeout` (and up to 2 s to find the cause), and all workers are ended:

    it raised        a Failure comes through the pipe
    it died          its exit code, or the signal that killed it
    it stalls        a collective, or the pipe, waits too long, and one rank has sent nothing

`worker.py` is what a worker runs.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import threading
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING

import torch

from nanovllm.errors import ContactLostError, WorkerError
from nanovllm.parallel.interrupts import interrupts_blocked, interrupts_deferred
from nanovllm.parallel.ranks import Lockstep, Ranks, rank_device
from nanovllm.parallel.tensor_parallel import START_TIMEOUT, TensorParallel, connect, serve_store
from nanovllm.parallel.torchrun import TorchrunRank
from nanovllm.parallel.worker import OBSERVER_FAILED, Failure, Ready, WorkerSetup, worker_main
from nanovllm.utils.threads import num_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from nanovllm.config import Config
    from nanovllm.engine.model_inputs import Step
    from nanovllm.observer import Observer
    from nanovllm.utils.model_config import ModelConfig

_SECONDS_TO_EXPLAIN = 2.0  # to wait for a Failure, after something went wrong
_SECONDS_TO_EXIT = 5.0  # for a worker that was told to stop; after that it is killed
_SECONDS_TO_GIVE_UP = 0.5  # for a worker whose pipe was closed; after that it is killed


@dataclass(slots=True)
class _Workers:
    """What must be ended: the processes from rank 1 on, the pipe to each, the process group."""

    processes: list[SpawnProcess] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    parallel: TensorParallel | None = None
    owner: int = field(default_factory=os.getpid)
    failed_observers: list[int] = field(default_factory=list)

    def stop(self, *, sends_stop: bool = True) -> None:
        """End every process, and wait until it has.

        Args:
            sends_stop: first send each a message to stop; else only close the pipes.
        """
        if self.is_forked:
            self._release_fork()
            return
        for connection in self.connections:
            if sends_stop:
                with suppress(OSError):  # it has ended already
                    connection.send(None)
            connection.close()
        for process in self.processes:
            process.join(_SECONDS_TO_EXIT if sends_stop else _SECONDS_TO_GIVE_UP)
            process.kill()  # if it still computes, or hangs in a collective; its trace is flushed
            process.join()
        codes = enumerate((process.exitcode for process in self.processes), start=1)
        self.failed_observers = [rank for rank, code in codes if code == OBSERVER_FAILED]
        self.processes.clear()
        self.connections.clear()
        if self.parallel is not None:
            self.parallel.close()

    def is_any_gone(self) -> bool:
        """Has one of them ended?"""
        return any(process.exitcode is not None for process in self.processes)

    @property
    def is_forked(self) -> bool:
        """Is this process a fork of rank 0's? Then the workers are not its children."""
        return os.getpid() != self.owner

    def _release_fork(self) -> None:
        """In a fork: let it exit without ending the workers, and without waiting for them."""
        for connection in self.connections:  # the fork's copies: those of rank 0 stay open
            connection.close()
        # The children that multiprocessing ends at exit; there is no public access to them.
        getattr(multiprocessing.process, "_children", set()).difference_update(self.processes)
        if self.parallel is not None:
            self.parallel.close()


class WorkerGroup(Ranks):
    """This process as rank 0, and ranks 1 .. tensor_parallel_size - 1 as its child processes.

    Args:
        config: the engine's settings, resolved.
        model_config: the model's config.
        observer: its `for_workers` gives the observers of the workers.

    Raises:
        WorkerError: a worker did not start.
        TypeError: what `for_workers` returns cannot be pickled.
    """

    def __init__(self, config: Config, model_config: ModelConfig, observer: Observer) -> None:
        num_ranks = config.tensor_parallel_size
        self._timeout = config.distributed_timeout
        # With more threads than cores, ranks would wait for each other in every layer.
        self._num_threads = max(1, torch.get_num_threads() // num_ranks)
        self._observer = observer
        self._ended: str | None = None
        self._workers = _Workers()
        # Exit handlers run in reverse order: this one runs before multiprocessing kills daemons.
        self._finalizer = weakref.finalize(self, self._workers.stop)
        self._finalizer.atexit = False
        atexit.register(self._finalizer)
        with self._watching("start"):
            store, port = serve_store()
            make_observer = _observer_maker(observer)
            for rank in range(1, num_ranks):
                setup = WorkerSetup(
                    rank=rank,
                    port=port,
                    config=config,
                    model_config=model_config,
                    make_observer=make_observer,
                    num_threads=self._num_threads,
                    dies_with_thread=threading.current_thread() is threading.main_thread(),
                )
                self._start(setup)
            self._await_workers()
            device = rank_device(config.device, 0)
            parallel = connect(store, 0, num_ranks, device, self._timeout, is_one_machine=True)
        parallel.is_any_gone = self._workers.is_any_gone
        self._workers.parallel = parallel
        super().__init__(parallel, num_ranks)

    # -- as Ranks --------------------------------------------------------------------------------

    def starting(self) -> AbstractContextManager[None]:
        """See Ranks."""
        return self._watching("start")

    @contextmanager
    def computing(self, step: Step) -> Iterator[None]:
        """See Ranks. Ctrl-C is deferred until the step is computed, so that the ranks agree."""
        with interrupts_deferred(), self._watching("step"):
            self._send(step)
            with num_threads(self._num_threads):
                yield

    def exit(self) -> None:
        """See Ranks."""
        self._end("exit() was called", sends_stop=True)
        for rank in self._workers.failed_observers:
            error = WorkerError(f"the observer of rank {rank} raised an error, which was printed")
            with suppress(Exception):  # it may raise as well
                self._observer.failed("for_workers", error)
        self._workers.failed_observers.clear()

    # -- start and end ---------------------------------------------------------------------------

    def _start(self, setup: WorkerSetup) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._workers.connections.append(ours)
        _limit_sends(ours, self._timeout)
        process = context.Process(
            target=worker_main,
            args=(setup, theirs),
            name=f"nanovllm-rank-{setup.rank}",
            daemon=True,
        )
        if os.name == "posix":
            resource_tracker.ensure_running()  # starting it later would unblock interrupts
        with interrupts_blocked():
            process.start()
        self._workers.processes.append(process)
        theirs.close()  # only the worker has this end now, so the pipe closes when it ends

    def _await_workers(self) -> None:
        """Wait until every worker is ready, then tell all of them to connect."""
        for rank, connection in enumerate(self._workers.connections, start=1):
            if not connection.poll(START_TIMEOUT):
                raise WorkerError(f"rank {rank} did not start within {START_TIMEOUT:g} s")
            try:
                reply = connection.recv()
            except (EOFError, OSError) as error:
                raise ContactLostError(f"rank {rank} ended at its start") from error
            if isinstance(reply, Failure):
                raise _rank_error(rank, reply)
        self._send(Ready())

    def _end(self, why: str, *, sends_stop: bool) -> None:
        if self._ended is None:
            self._ended = f"this engine has ended, make a new LLM: {why}"
            atexit.unregister(self._finalizer)
            if self._finalizer.detach() is not None:
                with interrupts_deferred():  # otherwise a worker that hangs could be left running
                    self._workers.stop(sends_stop=sends_stop)

    # -- a step ----------------------------------------------------------------------------------

    def _send(self, what: Step | Ready) -> None:
        content = ForkingPickler.dumps(what)  # once for all workers
        for rank, connection in enumerate(self._workers.connections, start=1):
            try:
                connection.send_bytes(content)
            except OSError as error:
                raise ContactLostError(f"rank {rank} does not receive: {error}") from error

    @contextmanager
    def _watching(self, what: str) -> Iterator[None]:
        """Turn every failure of a worker into a WorkerError. After any error, end all workers."""
        if self._ended is not None:
            raise WorkerError(self._ended)
        if self._workers.is_forked:
            raise WorkerError(
                f"the workers of this engine belong to process {self._workers.owner}, and process "
                f"{os.getpid()} is a fork of it: use the LLM there, or fork before you make it"
            )
        try:
            yield
        except ContactLostError as error:
            limit = f"{self._timeout:g} s (distributed_timeout)"
            cause = self._find_cause(error, f"{START_TIMEOUT:g} s" if what == "start" else limit)
            self._end(str(cause), sends_stop=False)
            raise cause from error
        except BaseException as error:
            why = f"rank 0 failed within a {what}: {type(error).__name__}: {error}"
            self._end(why, sends_stop=False)
            raise

    def _find_cause(self, error: ContactLostError, limit: str) -> WorkerError:
        """Find the rank that failed first; others may report only that they lost contact."""
        noticed: list[str] = []
        pairs = zip(self._workers.connections, self._workers.processes, strict=True)
        silent = dict(enumerate(pairs, start=1))
        while silent and wait([pipe for pipe, _ in silent.values()], _SECONDS_TO_EXPLAIN):
            for rank, (connection, process) in list(silent.items()):
                reply = _read_failure(connection, process)
                if isinstance(reply, str):
                    return WorkerError(f"rank {rank} {reply}")
                if reply is not None and not reply.is_consequence:
                    return _rank_error(rank, reply)
                if reply is not None:
                    noticed.append(f"rank {rank}: {reply.error}")
                    del silent[rank]
        if silent:
            ranks = " and ".join(map(str, silent))
            return WorkerError(f"rank {ranks} did not answer within {limit}")
        noticed.insert(0, f"{error} ({error.__cause__})")
        return WorkerError(f"the ranks lost each other: {'; '.join(noticed)}")


def join_ranks(config: Config, model_config: ModelConfig, observer: Observer) -> Ranks:
    """Connect to the other ranks; start them, unless torchrun has done so.

    Raises:
        ValueError: torchrun started another number of processes than `tensor_parallel_size`.
        ValueError: there are fewer GPUs than ranks.
        WorkerError: not every rank started.
    """
    num_ranks = config.tensor_parallel_size
    torchrun = TorchrunRank.from_environment(os.environ)
    if torchrun is not None and torchrun.world_size != num_ranks:
        raise ValueError(
            f"tensor_parallel_size={num_ranks}, but the environment says WORLD_SIZE="
            f"{torchrun.world_size}: run `torchrun --nproc-per-node {num_ranks}`, or set "
            f"tensor_parallel_size={torchrun.world_size}, or, if no launcher started this process, "
            "unset RANK and WORLD_SIZE"
        )
    if num_ranks == 1:
        return Ranks(TensorParallel(device=rank_device(config.device, 0)))
    if torchrun is not None:
        return Lockstep(torchrun, config)
    rank_device(config.device, num_ranks - 1)  # raises if there are fewer GPUs than ranks
    return WorkerGroup(config, model_config, observer)


def _read_failure(connection: Connection, process: SpawnProcess) -> Failure | str | None:
    """How a worker ended: its Failure, or a description; None if it is still running."""
    try:
        while connection.poll():
            reply = connection.recv()
            if isinstance(reply, Failure):
                return reply
    except (EOFError, OSError):
        process.join(_SECONDS_TO_GIVE_UP)
        if process.exitcode is None:
            return "closed its pipe"
    code = process.exitcode
    if code is None:
        return None
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        hint = " (did the machine run out of memory?)" if code == -signal.SIGKILL else ""
        return f"was killed by {names.get(-code, f'signal {-code}')}{hint}"
    hint = ' (is the script\'s own work under `if __name__ == "__main__":`?)' if code == 1 else ""
    return f"ended with exit code {code}{hint}"


def _rank_error(rank: int, failure: Failure) -> WorkerError:
    error = WorkerError(f"rank {rank} raised {failure.error}")
    error.add_note(f"In rank {rank}:\n{failure.trace}")
    return error


def _observer_maker(observer: Observer) -> Callable[[int], Observer] | None:
    make_observer = observer.for_workers()
    try:
        pickle.dumps(make_observer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            "the observer's for_workers() must return something that can be sent to another "
            f"process, such as a function of a module, not {make_observer!r}: {error}"
        ) from error
    return make_observer


def _limit_sends(connection: Connection, seconds: float) -> None:
    """Set a time limit for sending through a pipe, which is a pair of sockets.

    A send can wait twice, for the part that still fits and for the rest: so each gets half.
    """
    if os.name == "posix":
        seconds /= 2
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6) or (0 if whole else 1))
        with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
