"""The machine: what everything ran on, so that a figure can be judged and repeated.

Knows how to ask the system, and how to measure a memory's bandwidth. Does not know what is
measured on it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nvtrace.bench.report import Machine
from nvtrace.environment import version_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_COPY_BYTES = {"cpu": 256 * 1024**2, "cuda": 1024**3}
_NUM_COPIES = 8
_PACKAGES = ("torch", "transformers", "nanovllm")


def describe_machine(device: torch.device, bytes_per_second: float | None = None) -> Machine:
    """What the models ran on.

    Args:
        device: the models'.
        bytes_per_second: its measured bandwidth.
    """
    is_gpu = device.type == "cuda"
    return Machine(
        processor=_processor(),
        platform=f"{platform.system()} {platform.machine()}",
        num_cpus=os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if is_gpu else "cpu",
        bytes_per_second=bytes_per_second,
        load_average=load_average(),
        wait_policy=os.environ.get("OMP_WAIT_POLICY"),
        versions={"python": platform.python_version()}
        | {p: version_of(p) or "unknown" for p in _PACKAGES},
        commit=_commit(),
    )


def load_average() -> float | None:
    """Processes that wanted a core, over the last minute; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


@contextmanager
def computing_with(num_threads: int | None) -> Iterator[None]:
    """Let torch compute with so many CPU threads within the context; None leaves it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy on the device moves, read and written; the best of 8."""
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    best = float("inf")
    for _ in range(_NUM_COPIES):
        _wait_for(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait_for(device)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The checkout's commit, "-dirty" if files were changed; None if this is no checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    here = Path(__file__).parent
    if not (here.parents[2] / ".git").exists():  # installed; the folder may be in another checkout
        return None
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            command, cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None
