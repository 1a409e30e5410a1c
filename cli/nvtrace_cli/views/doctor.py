"""What `nvtrace doctor` found, for people or for other programs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from nvtrace_cli.views.console import make_console
from nvtrace_cli.views.machine import json_line
from nvtrace_cli.views.prose import Prose
from nvtrace_cli.views.text import duration, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvtrace.catalog import Catalog
    from nvtrace.doctor import Machine, TracingCost


def print_json(machine: Machine, tracing: TracingCost | None) -> None:
    """One object; times are in nanoseconds, sizes in bytes."""
    found = {"machine": asdict(machine), "tracing": None if tracing is None else asdict(tracing)}
    sys.stdout.write(json_line(found) + "\n")


def print_report(machine: Machine, tracing: TracingCost | None, catalog: Catalog) -> None:
    """A line a finding."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in (*_machine(machine, catalog), *_tracing(tracing, catalog)):
        table.add_row(Text(name, "bold"), Prose((value, "")))
    make_console().print(table)


def _machine(machine: Machine, catalog: Catalog) -> Iterator[tuple[str, str]]:
    yield (
        catalog.ui("doctor_machine"),
        catalog.ui(
            "doctor_machine_is",
            platform=machine.platform,
            num_cpus=machine.num_cpus,
            memory=size(machine.memory_bytes),
            free=size(machine.free_bytes),
        ),
    )
    absent = catalog.ui("doctor_absent")
    packages = [f"{name} {version or absent}" for name, version in machine.packages.items()]
    yield catalog.ui("doctor_packages"), ", ".join([f"Python {machine.python}", *packages])
    if machine.gpu is None:
        yield "GPU", catalog.ui("doctor_no_gpu")
    else:
        yield "GPU", f"{machine.gpu}, {size(machine.gpu_memory_bytes or 0)}"
    yield (
        "auto",
        catalog.ui(
            "doctor_auto",
            device=machine.device,
            dtype=machine.dtype,
            backend=machine.attention_backend,
            why=catalog.codes("ENGINE_INIT", "attention_reason")[machine.attention_reason],
        ),
    )
    if machine.gpu is None:
        is_packed = "doctor_packed" if machine.packs_weights else "doctor_not_packed"
        yield catalog.ui("doctor_weights"), catalog.ui(is_packed)
    else:
        is_fused = "doctor_fused" if machine.fused_kernels else "doctor_not_fused"
        yield catalog.ui("doctor_kernels"), catalog.ui(is_fused)


def _tracing(tracing: TracingCost | None, catalog: Catalog) -> Iterator[tuple[str, str]]:
    if tracing is not None:
        yield (
            catalog.ui("doctor_tracing"),
            catalog.ui(
                "doctor_tracing_is",
                share=f"{tracing.share:+.1%}",
                plain=duration(tracing.step_ns),
                traced=duration(tracing.traced_step_ns),
                num_seqs=tracing.num_seqs,
            ),
        )
