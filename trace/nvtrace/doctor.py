"""What this machine can run, and what tracing costs on it.

The cost of tracing is measured with decode steps of the model that ships: a few steps with an
observer and a few without, by turns in one run, so that other load on the machine affects both.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nvtrace.environment import version_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanovllm import LLM

PACKAGES = ("torch", "transformers", "triton", "flash-attn", "pandas", "pyarrow")
NUM_ROUNDS = 12
NUM_STEPS = 12
NUM_SEQS = 2


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, and what "auto" means on it for a Qwen3 with heads of 128.

    Attributes:
        python, platform: version, and name of the platform.
        num_cpus: that this process sees.
        memory_bytes, free_bytes: of the machine, or of its container.
        packages: name -> version; None if it is not installed.
        gpu: the name of the GPU that torch sees; None without one.
        gpu_memory_bytes: all of its memory.
        device, dtype: the values of "auto".
        attention_backend, attention_reason: the value of "auto", and the reason.
        fused_kernels: can the model run with the project's own kernels?
        packs_weights: does torch have the library that packs the weights for a CPU?
    """

    python: str
    platform: str
    num_cpus: int
    memory_bytes: int
    free_bytes: int
    packages: dict[str, str | None]
    gpu: str | None
    gpu_memory_bytes: int | None
    device: str
    dtype: str
    attention_backend: str
    attention_reason: str
    fused_kernels: bool
    packs_weights: bool


@dataclass(frozen=True, slots=True)
class TracingCost:
    """What tracing costs, with the model that ships.

    Attributes:
        step_ns: a decode step of `num_seqs` sequences, untraced (median).
        traced_step_ns: the same, traced.
        share: median of (traced / untraced) - 1 over the pairs.
        num_seqs: sequences in the step.
    """

    step_ns: int
    traced_step_ns: int
    share: float
    num_seqs: int


def examine_machine() -> Machine:
    """Examine the machine. Loads torch."""
    import torch  # noqa: PLC0415 - `nvtrace --help` does not need it

    from nanovllm.gpu.attention_choice import attention_facts, can_fuse, choose_attention  # noqa: PLC0415 - the same
    from nanovllm.layers.packed_weight import PackedWeight  # noqa: PLC0415 - the same
    from nanovllm.utils.devices import cpu_memory, gpu_capability, resolve_device, resolve_dtype  # noqa: PLC0415 - the same

    device = resolve_device("auto")
    capability = gpu_capability(device)
    dtype = resolve_dtype("auto", device, "bfloat16", capability)
    facts = attention_facts(device, capability, dtype, head_dim=128, block_size=256)
    backend, reason = choose_attention("auto", facts)
    is_gpu = device == "cuda"
    memory_bytes, free_bytes = cpu_memory()
    return Machine(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        num_cpus=os.cpu_count() or 1,
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
        packages={name: version_of(name) for name in PACKAGES},
        gpu=torch.cuda.get_device_name() if is_gpu else None,
        gpu_memory_bytes=torch.cuda.mem_get_info()[1] if is_gpu else None,
        device=device,
        dtype=dtype,
        attention_backend=backend,
        attention_reason=reason,
        fused_kernels=can_fuse(facts),
        packs_weights=PackedWeight.pays(torch.empty(1, 1)),
    )


def measure_tracing() -> TracingCost:
    """Decode with and without a trace, by turns. Takes some seconds."""
    from nvtrace.recorder import record  # noqa: PLC0415 - imports the engine

    silent = _make_engine(None)
    with (
        tempfile.TemporaryDirectory(prefix="nvtrace-doctor-") as folder,
        record(Path(folder) / "trace.jsonl") as observer,
    ):
        traced = _make_engine(observer)
        rounds = [(_time_steps(silent), _time_steps(traced)) for _ in range(NUM_ROUNDS + 1)][1:]
    return TracingCost(
        step_ns=round(statistics.median(plain for plain, _ in rounds)),
        traced_step_ns=round(statistics.median(with_trace for _, with_trace in rounds)),
        share=statistics.median(with_trace / plain for plain, with_trace in rounds) - 1,
        num_seqs=NUM_SEQS,
    )


def _make_engine(observer: object) -> LLM:
    """The model that ships, with running requests that do not end during the measurement."""
    from nanovllm import LLM, SamplingParams  # noqa: PLC0415 - loads torch
    from nanovllm.assets import TINY_QWEN3  # noqa: PLC0415 - the same

    llm = LLM(TINY_QWEN3, observer=observer, num_kvcache_blocks=16)  # type: ignore[arg-type]
    num_steps = (NUM_ROUNDS + 2) * NUM_STEPS
    params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
    for first in range(NUM_SEQS):
        llm.add_request([first + 5, 7, 9, 11], params)
    llm.step()
    return llm


def _time_steps(llm: LLM) -> float:
    """The time of a step in nanoseconds, the median of a few."""
    return statistics.median(_step_times(llm))


def _step_times(llm: LLM) -> Iterator[int]:
    for _ in range(NUM_STEPS):
        begin = time.perf_counter_ns()
        llm.step()
        yield time.perf_counter_ns() - begin
