"""The machine that a benchmark ran on, and the bandwidth of its memory."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.utils.devices import device_memory
from nvtrace.bench.report import MachineFacts
from nvtrace.environment import version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_COPY_BYTES = {"cpu": 256 * 1024**2, "cuda": 4 * 1024**3}
_NUM_COPIES = {"cpu": 1, "cuda": 10}
_NUM_TRIES = 8
_PACKAGES = ("torch", "transformers", "nanovllm")


def describe_machine(device: torch.device, bytes_per_second: float | None = None) -> MachineFacts:
    """Describe the machine.

    Args:
        device: that the models run on.
        bytes_per_second: its measured bandwidth.
    """
    is_gpu = device.type == "cuda"
    return MachineFacts(
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
    """The load average of the last minute: processes that need a core; None if unknown."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


@contextmanager
def computing_with(num_threads: int | None) -> Iterator[None]:
    """Set torch's number of CPU threads, and restore it at the end; None does not change it."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class HostEvent:
    """A time on the host's clock, with the methods of a `torch.cuda.Event`."""

    def __init__(self, *, enable_timing: bool) -> None:
        del enable_timing  # it always is
        self.seconds = 0.0

    def record(self) -> None:
        """Store the current time."""
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Does nothing: on a CPU, there is nothing to wait for."""

    def elapsed_time(self, later: HostEvent) -> float:
        """Milliseconds from this event to a later one."""
        return (later.seconds - self.seconds) * 1e3


def measure_bandwidth(
    device: torch.device, num_copies: int | None = None, new_event: Callable[..., Any] | None = None
) -> float:
    """Measure bytes per second, read and written, of large copies on a device; the best of 8 tries.

    On a GPU a try is ten copies, timed by the GPU: the host's clock would include the time to
    launch a copy and to wait for its end. Reading alone can be a few percent faster than copying.

    Args:
        device: whose memory.
        num_copies: in a try; None for the device's default.
        new_event: creates the events that measure the time; None for the device's default.
    """
    free = device_memory(device)[1]
    num_copies = num_copies or _NUM_COPIES[device.type]
    usual_event: Callable[..., Any] = HostEvent if device.type == "cpu" else torch.cuda.Event
    make = new_event or usual_event
    source = torch.ones(copy_size(device.type, free), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    best_ms = float("inf")
    for _ in range(_NUM_TRIES):
        first, last = (make(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(num_copies):
            target.copy_(source)
        last.record()
        last.synchronize()
        best_ms = min(best_ms, first.elapsed_time(last))
    num_bytes = 2 * source.nbytes * num_copies
    del source, target
    if device.type == "cuda":
        torch.cuda.empty_cache()  # otherwise an engine would see this memory as used
    return num_bytes / best_ms * 1e3


def copy_size(device_type: str, free_bytes: int) -> int:
    """Bytes of one copy: more than any cache, but at most a quarter of the free memory."""
    return max(min(_COPY_BYTES[device_type], free_bytes // 4), 1)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The checkout's commit, with "-dirty" if files were changed; None without a checkout."""
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
