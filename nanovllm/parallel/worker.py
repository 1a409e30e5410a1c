"""The process of a rank that the engine started: it computes the steps that rank 0 sends.

    rank 0 ──Ready, Step, Step, ... None──> worker  through a pipe; no limit to a step's size
    rank 0 <──Ready, perhaps Failure── worker       the same pipe
    rank 0 <══════ collectives ══════> worker       all results

It must not outlive rank 0. A thread waits for the end of rank 0's process, so that it is noticed
even in the middle of a collective; on Linux the kernel also kills the worker.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nanovllm.engine.model_runner import ModelRunner
from nanovllm.errors import ContactLostError
from nanovllm.observer import SILENT
from nanovllm.parallel.ranks import Ranks, rank_device
from nanovllm.parallel.tensor_parallel import connect, join_store
from nanovllm.utils.guard import Guard, guarded

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from nanovllm.config import Config
    from nanovllm.engine.model_inputs import Step
    from nanovllm.observer import Observer
    from nanovllm.utils.model_config import ModelConfig

OBSERVER_FAILED = 3  # the exit code of a worker whose observer raised an error
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a worker gets at its start.

    Attributes:
        rank: from 1.
        port: of rank 0's TCPStore, on this machine.
        config, model_config: the same as rank 0's.
        make_observer: called with the rank; None for no observer.
        num_threads: CPU threads to compute with.
        dies_with_thread: let the kernel kill the worker when the thread that started it ends: only
            for the main thread, which ends with its process.
    """

    rank: int
    port: int
    config: Config
    model_config: ModelConfig
    make_observer: Callable[[int], Observer] | None
    num_threads: int
    dies_with_thread: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has imported everything. As the answer: all workers have, so connect now."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended a worker.

    Attributes:
        error: its type and message.
        trace: its traceback.
        is_consequence: was it caused by the end of another rank?
    """

    error: str
    trace: str
    is_consequence: bool


def worker_main(setup: WorkerSetup, connection: Connection) -> None:
    """Run rank `setup.rank` until rank 0 sends None or has ended. Does not return."""
    # Ctrl-C is sent to every process in the terminal. Only rank 0 handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent(dies_with_thread=setup.dies_with_thread)
    try:
        observer = SILENT if setup.make_observer is None else setup.make_observer(setup.rank)
        guard = guarded(observer)
        with observer:
            _serve(setup, connection, guard)
    except EOFError:  # rank 0 has ended, or has closed the pipe
        code = 1
    except BaseException as error:  # noqa: BLE001 - rank 0 must get any
        _report(connection, error)
        code = 1
    else:
        code = OBSERVER_FAILED if isinstance(guard, Guard) and guard.failures else 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to do, and an orderly exit with torch takes a second


def _serve(setup: WorkerSetup, connection: Connection, observer: Observer) -> None:
    config = setup.config
    torch.set_num_threads(setup.num_threads)
    connection.send(Ready())
    connection.recv()  # all ranks are ready
    parallel = connect(
        join_store(setup.port),
        setup.rank,
        config.tensor_parallel_size,
        rank_device(config.device, setup.rank),
        config.distributed_timeout,
        is_one_machine=True,
    )
    observer.engine_init(config, setup.model_config)
    ranks = Ranks(parallel, config.tensor_parallel_size)
    runner = ModelRunner(config, setup.model_config, observer, ranks)
    while (step := connection.recv()) is not None:
        observer.step_start(step.engine_step)
        _compute(runner, step)
    parallel.close()


@torch.inference_mode()
def _compute(runner: ModelRunner, step: Step) -> None:
    """Compute this rank's part of a step that rank 0 has started."""
    if runner.graphs is not None and runner.graphs.can_compute(step.inputs):
        runner.graphs.compute(step, step.inputs)
    else:
        runner.compute_eagerly(step)


def _report(connection: Connection, error: BaseException) -> None:
    failure = Failure(
        error=f"{type(error).__name__}: {error}",
        trace="".join(traceback.format_exception(error)),
        is_consequence=isinstance(error, ContactLostError),
    )
    with suppress(OSError):  # rank 0 has ended
        connection.send(failure)


def _end_with_parent(*, dies_with_thread: bool) -> None:
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="nanovllm-parent-watch", daemon=True).start()
    if dies_with_thread and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
