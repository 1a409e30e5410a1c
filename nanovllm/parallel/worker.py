"""The process of a rank that the engine started: it computes what rank 0 says, until told to stop.

    rank 0 ──Step, Step, ... None──> worker         through a pipe; no limit to a step's size
    rank 0 <──Ready, perhaps Failure── worker       the same pipe
    rank 0 <══════ collectives ══════> worker       all results

It must not outlive rank 0. Rank 0's death closes a pipe, which a thread waits for, so that it is
noticed in the middle of a collective as well; on Linux the kernel kills the worker besides.

Knows the model runner. Does not know requests, queues or sampling.
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
from nanovllm.utils.guard import guarded

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from nanovllm.config import Config
    from nanovllm.engine.model_inputs import Step
    from nanovllm.observer import Observer
    from nanovllm.utils.model_config import ModelConfig

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """All that a worker is told at its start.

    Attributes:
        rank: its number, from 1.
        port: of rank 0's TCPStore, on this machine.
        config, model_config: as rank 0 has them.
        make_observer: called with the rank; None for silence.
        num_threads: CPU threads to compute with.
        dies_with_thread: let the kernel kill it with the thread that started it: right only for
            a thread that lives as long as its process.
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
    """A worker's first word: everything is imported, the others can be met."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's last word.

    Attributes:
        error: type and message of the exception.
        trace: where it happened.
        is_consequence: another rank's end brought it about.
    """

    error: str
    trace: str
    is_consequence: bool


def worker_main(setup: WorkerSetup, connection: Connection) -> None:
    """Be rank `setup.rank` until rank 0 says None or is gone. Does not return."""
    # Ctrl-C reaches every process of a terminal's job. What becomes of it, rank 0 decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent(dies_with_thread=setup.dies_with_thread)
    try:
        observer = SILENT if setup.make_observer is None else setup.make_observer(setup.rank)
        with observer:
            _serve(setup, connection, guarded(observer))
    except EOFError:  # rank 0 is gone, or has given up
        code = 1
    except BaseException as error:  # noqa: BLE001 - rank 0 must hear of any
        _report(connection, error)
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to do, and taking torch apart in good order takes a second


def _serve(setup: WorkerSetup, connection: Connection, observer: Observer) -> None:
    config = setup.config
    torch.set_num_threads(setup.num_threads)
    connection.send(Ready())
    connection.recv()  # the others are there too: from now on nobody waits long
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
    with suppress(OSError):  # nobody is left to hear it
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
