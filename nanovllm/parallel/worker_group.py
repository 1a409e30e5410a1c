"""WorkerGroup: rank 0's hold on the processes that it started for the other ranks.

Whatever goes wrong with one of them ends as a WorkerError that says which one and why, within
`distributed_timeout` (and a moment to find the cause), with no process left:

    it raised        its last reply come through the pipe
    it died          its exit code, or the signal that killed it
    it stalls        a collective, or the pipe, waits too long, and one rank has not said a word

Knows processes, pipes and time limits. Does not know what is computed (`worker.py`).
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
from nanovllm.parallel.worker import Failure, Ready, WorkerSetup, worker_main
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

_SECONDS_TO_EXPLAIN = 2.0  # for somebody's last reply to come in, after something went wrong
_SECONDS_TO_EXIT = 5.0  # for a worker that was told to stop; then it is killed
_SECONDS_TO_GIVE_UP = 0.5  # for a worker whose pipe was closed; then it is killed


@dataclass(slots=True)
class _Workers:
    """What must come to an end: the processes, rank 1's first, the pipe to each, the group."""

    processes: list[SpawnProcess] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    parallel: TensorParallel | None = None
    owner: int = field(default_factory=os.getpid)

    def stop(self, *, sends_stop: bool = True) -> None:
        """End every process, and wait until it has.

        Args:
            sends_stop: tell them to stop; else only close the pipes, which says the same to those
                who listen.
        """
        if self.is_forked:
            self._release_fork()
            return
        for connection in self.connections:
            if sends_stop:
                with suppress(OSError):  # it is gone already
                    connection.send(None)
            connection.close()
        for process in self.processes:
            process.join(_SECONDS_TO_EXIT if sends_stop else _SECONDS_TO_GIVE_UP)
            process.kill()  # it computes, or hangs in a collective; its trace is flushed
            process.join()
        self.processes.clear()
        self.connections.clear()
        if self.parallel is not None:
            self.parallel.close()

    def is_any_gone(self) -> bool:
        """Has one of them ended?"""
        return any(process.exitcode is not None for process in self.processes)

    @property
    def is_forked(self) -> bool:
        """Is this a fork of rank 0's process? It has the lists, but the workers are not its own."""
        return os.getpid() != self.owner

    def _release_fork(self) -> None:
        """Let a fork come to its end without ending the workers, and without waiting for them."""
        for connection in self.connections:  # this process's ends: rank 0 has its own
            connection.close()
        # Those that multiprocessing ends when this process exits; there is no public way to them.
        getattr(multiprocessing.process, "_children", set()).difference_update(self.processes)
        if self.parallel is not None:
            self.parallel.close()


class WorkerGroup(Ranks):
    """Ranks 1 .. tensor_parallel_size - 1 as child processes, and this process as rank 0.

    Args:
        config: the engine's settings, resolved.
        model_config: the checkpoint's shape.
        observer: asked for the observers of the workers.

    Raises:
        WorkerError: a worker did not start.
        TypeError: what the observer gives for the workers cannot be sent to them.
    """

    def __init__(self, config: Config, model_config: ModelConfig, observer: Observer) -> None:
        num_ranks = config.tensor_parallel_size
        self._timeout = config.distributed_timeout
        # More threads than cores would wait for each other in every layer.
        self._num_threads = max(1, torch.get_num_threads() // num_ranks)
        self._ended: str | None = None
        self._workers = _Workers()
        # Registered late, so run early: before multiprocessing ends its daemons the hard way.
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
        """See Ranks. Ctrl-C waits until the step is computed: the ranks must not part."""
        with interrupts_deferred(), self._watching("step"):
            self._send(step)
            with num_threads(self._num_threads):
                yield

    def exit(self) -> None:
        """See Ranks."""
        self._end("exit() was called", sends_stop=True)

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
            resource_tracker.ensure_running()  # started below, it would unblock interrupts
        with interrupts_blocked():
            process.start()
        self._workers.processes.append(process)
        theirs.close()  # the worker's is the only one now, and its end closes the pipe

    def _await_workers(self) -> None:
        """Wait until every worker is there, then tell them: from now on nobody waits long."""
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
                with interrupts_deferred():  # or a worker that hangs would be left behind
                    self._workers.stop(sends_stop=sends_stop)

    # -- a step ----------------------------------------------------------------------------------

    def _send(self, what: Step | Ready) -> None:
        content = ForkingPickler.dumps(what)  # once for all
        for rank, connection in enumerate(self._workers.connections, start=1):
            try:
                connection.send_bytes(content)
            except OSError as error:
                raise ContactLostError(f"rank {rank} does not receive: {error}") from error

    @contextmanager
    def _watching(self, what: str) -> Iterator[None]:
        """Turn every way in which a worker can fail into a WorkerError; leave nothing running."""
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
        """Who was it? Those who only noticed say so; the first who knows more has the word."""
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
    """Take a place among the ranks; start the other ones if nobody else has.

    Raises:
        ValueError: torchrun started another number of processes than `tensor_parallel_size`.
        ValueError: there are fewer GPUs than ranks.
        WorkerError: not every rank came.
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
    rank_device(config.device, num_ranks - 1)  # is there one for the last?
    return WorkerGroup(config, model_config, observer)


def _read_failure(connection: Connection, process: SpawnProcess) -> Failure | str | None:
    """What became of a worker: its exception, or how it ended; None if it goes on."""
    try:
        while connection.poll():
            reply = connection.recv()
            if isinstance(reply, Failure):
                return reply
    except (EOFError, OSError):
        process.join(_SECONDS_TO_GIVE_UP)
        if process.exitcode is None:
            return "hung up"
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
    """Let a send fail that waits so long for a worker to read: its pipe is a pair of sockets.

    It can wait twice: once for the part that still goes in, and once for the rest, which does not.
    """
    if os.name == "posix":
        seconds /= 2
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6) or (0 if whole else 1))
        with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
