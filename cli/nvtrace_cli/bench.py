"""nvtrace bench: the speed of the engine and of transformers on this machine.

`nvtrace.bench` measures, `views/bench.py` draws the tables.
"""

from __future__ import annotations

import os
import shlex
import sys
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from nvtrace_cli.failures import (
    CommandError,
    RunFailedError,
    UsageError,
    no_stdout_is_no_failure,
    tidy_ends,
)
from nvtrace_cli.options import complete_devices, say
from nvtrace_cli.outputs import check_out, prove_writable, refuse_streams, writing

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvtrace.bench.benchmark import Plan
    from nvtrace.bench.report import Report

_FOUND_A_DIFFERENCE = 1
_REFERENCES = ("generate", "continuous")
_LARGEST_SEED = 2**63 - 1  # torch's


class WorkloadChoice(StrEnum):
    """The workload that every contender runs."""

    UNEVEN = "uneven"
    SEED = "seed"
    DECODE = "decode"


class TraceChoice(StrEnum):
    """Whether the engine runs traced, untraced, or both."""

    OFF = "off"
    ON = "on"
    BOTH = "both"


class DtypeChoice(StrEnum):
    """The dtype to compute in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


def bench(
    workloads: Annotated[
        list[WorkloadChoice] | None,
        typer.Argument(
            metavar="[WORKLOAD]...",
            help="uneven (the default): 16 requests that end at different times; seed: nano-vllm's "
            "benchmark, 256 requests; decode: one batch size and context length after the other.",
            show_default=False,
        ),
    ] = None,
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="shipped|50m|0.6b|FOLDER",
            help="What runs: the tiny model, a random one, a folder (may be repeated). By default "
            "shipped and 50m on a CPU, 0.6b on a GPU.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="generate,continuous|none",
            help="Which of transformers' methods run too; by default both for uneven, else none.",
        ),
    ] = None,
    trace: Annotated[
        TraceChoice, typer.Option(help="Run the engine untraced, traced, or both.")
    ] = TraceChoice.BOTH,
    rounds: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Measured rounds; one warm-up round runs before them."
        ),
    ] = 2,
    requests: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the first N requests.")
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, max=4096, metavar="N", help="Batch size for decode (may be repeated)."),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=2**17, metavar="N", help="Context length for decode (may be repeated)."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=_LARGEST_SEED, help="Seed of prompts and random weights.")
    ] = 0,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, metavar="N", help="CPU threads; by default torch's number."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="The device: auto, cpu or cuda.", autocompletion=complete_devices)
    ] = "auto",
    dtype: Annotated[
        DtypeChoice, typer.Option(help="The dtype to compute in; auto is the engine's choice.")
    ] = DtypeChoice.AUTO,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as JSON, too.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="The tables with tabs, no colours.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only the report, no progress.")
    ] = False,
) -> None:
    """Measure the engine on this machine, and transformers for comparison.

    The report goes to stdout, progress and messages to stderr. Exit codes: 0 done, 1 the engines
    generated different tokens, 2 wrong usage, 5 the run failed.
    """
    if json and plain:
        raise UsageError("--json and --plain cannot be used together: give one of them")
    if (batch or context) and WorkloadChoice.DECODE not in (workloads or []):
        raise UsageError(
            "--batch and --context are options of the workload decode: nvtrace bench decode"
        )
    if out is not None:
        refuse_streams(out, "the report")
        check_out(out)
        prove_writable(out)
    names = _references(against)
    # Before torch is loaded, as `nvtrace run` does: threads that wait sleep instead of spinning.
    # The contenders have thread pools of their own, and one must not spin in the other's time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from nvtrace.bench.benchmark import Plan  # noqa: PLC0415 - --help needs no engine

    plan = Plan(
        workloads=tuple(choice.value for choice in workloads or [WorkloadChoice.UNEVEN]),
        models=tuple(model or ()),
        against=names,
        tracing=trace.value,
        num_rounds=rounds,
        num_requests=requests,
        seed=seed,
        num_threads=threads,
        device=device,
        dtype=dtype.value,
        batch_sizes=tuple(batch or ()),
        context_lens=tuple(context or ()),
        command=shlex.join(["nvtrace", *sys.argv[1:]]),
    )
    kept: list[Report] = []

    def keep(report: Report) -> None:  # after each model: what a later one breaks is not all
        kept.append(report)
        if out is not None:
            _write(report, out)

    try:
        report = _run(plan, keep, is_quiet=quiet)
    except (CommandError, KeyboardInterrupt):
        if kept:
            with no_stdout_is_no_failure():
                _show(kept[-1], as_json=json, is_plain=plain)
        raise
    if out is not None:
        say(f"the report is in {out}")
    _show(report, as_json=json, is_plain=plain)
    if any(result.same_tokens is False for result in report.results):
        raise typer.Exit(_FOUND_A_DIFFERENCE)


def _run(plan: Plan, keep: Callable[[Report], None], *, is_quiet: bool) -> Report:
    from nanovllm.errors import NanoVLLMError  # noqa: PLC0415 - --help needs no engine
    from nvtrace.bench import BenchmarkError  # noqa: PLC0415 - the same
    from nvtrace.bench.benchmark import run_benchmark  # noqa: PLC0415 - the same

    try:
        return run_benchmark(plan, _hush if is_quiet else say, keep)
    except CommandError:  # of keep
        raise
    except BenchmarkError as error:
        raise UsageError(str(error)) from error
    except NanoVLLMError as error:
        raise RunFailedError(str(error)) from error
    except Exception as error:
        raise RunFailedError(f"the benchmark failed: {type(error).__name__}: {error}") from error


def _show(report: Report, *, as_json: bool, is_plain: bool) -> None:
    from nvtrace_cli.views import bench as view  # noqa: PLC0415 - --help needs no rich

    if as_json:
        view.print_json(report)
    elif is_plain:
        view.print_plain(report)
    else:
        view.show(report)


def _write(report: Report, out: Path) -> None:
    from nvtrace.bench.report import encode  # noqa: PLC0415 - --help needs no msgspec
    from nvtrace.files import atomic_write  # noqa: PLC0415 - the same

    with tidy_ends(), writing(out, RunFailedError), atomic_write(out) as file:
        file.write(encode(report))


def _references(against: str | None) -> tuple[str, ...] | None:
    """The names in "generate,continuous"; () for "none"; None for the workload's default."""
    if against is None:
        return None
    if against == "none":
        return ()
    names = tuple(name.strip() for name in against.split(","))
    for name in names:
        if name not in _REFERENCES:
            raise UsageError(
                f"--against {against}: {name or 'an empty name'} is not one of "
                f"{', '.join(_REFERENCES)} or none"
            )
    return names


def _hush(_message: str) -> None:
    pass
