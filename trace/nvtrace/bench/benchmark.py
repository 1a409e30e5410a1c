"""The whole benchmark: every workload on every model, with every contender.

It opens the contenders, runs the rounds, closes the contenders, reads the trace, and creates the
report.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.assets import TINY_QWEN3
from nanovllm.config import Config
from nanovllm.errors import KVCacheError
from nanovllm.utils.devices import cpu_memory
from nanovllm.utils.model_config import ModelConfig
from nvtrace.bench import BenchmarkError
from nvtrace.bench.contenders import (
    ENGINE,
    REFERENCES,
    TRACED,
    Continuous,
    Generate,
    load_reference,
    quiet_transformers,
    running_engine,
)
from nvtrace.bench.machine import computing_with, describe_machine, measure_bandwidth
from nvtrace.bench.models import model_config, model_facts, model_folder
from nvtrace.bench.report import ContenderFacts, ModelSize, Report, Result, WorkloadFacts
from nvtrace.bench.rounds import Contender, Round, first_difference, ratios, run_rounds, spread
from nvtrace.bench.steps import Floor, StepFacts, read_steps, step_classes
from nvtrace.bench.workloads import (
    CPU_CLASSES,
    GPU_CLASSES,
    DecodeClasses,
    make_workloads,
    require_fitting,
)
from nvtrace.reader import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nvtrace.bench.workloads import Workload

_ENGINES = {"off": (ENGINE,), "on": (TRACED,), "both": (ENGINE, TRACED)}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        workloads: "uneven", "seed" or "decode", in the order to run them.
        models: "shipped", "50m", "0.6b" or folders; if empty, the default for the device.
        against: which of transformers' methods to compare with ("generate", "continuous"); None:
            the default of the workload.
        tracing: which engines run: "off" for the untraced one, "on" for the traced one, or "both".
        num_rounds: how many rounds are counted.
        num_requests: of each workload, only the first requests; None for all.
        seed: of prompts, lengths and random weights.
        num_threads: CPU threads for torch; None for torch's default.
        device, dtype: the engine's options; the other contenders get the same device and dtype.
        batch_sizes, context_lens: the step classes of `decode`; if empty, the device's default.
        command: the command line, for the report.
    """

    workloads: tuple[str, ...] = ("uneven",)
    models: tuple[str, ...] = ()
    against: tuple[str, ...] | None = None
    tracing: str = "both"
    num_rounds: int = 2
    num_requests: int | None = None
    seed: int = 0
    num_threads: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    batch_sizes: tuple[int, ...] = ()
    context_lens: tuple[int, ...] = ()
    command: str = ""


def run_benchmark(
    plan: Plan, say: Callable[[str], None], keep: Callable[[Report], None] | None = None
) -> Report:
    """Run the benchmark.

    Args:
        plan: what to measure.
        say: called with a progress message after each run.
        keep: called with the report so far after each model, so that an error in a later model does
            not lose it.

    Raises:
        BenchmarkError: a device, a model, a workload or a contender is not possible.
        NanoVLLMError: the engine cannot run the model.
    """
    created = datetime.now(tz=UTC).isoformat(timespec="seconds")
    try:
        device = torch.device(_resolved(TINY_QWEN3, plan).device)
    except ValueError as error:  # an option that no model would accept
        raise BenchmarkError(str(error)) from error
    models, classes = _models(plan, device), _decode_classes(plan, device)
    for model in models:  # check all models before the first round
        shape = model_config(model)
        for name in plan.workloads:
            require_fitting(
                *(name, plan.seed, plan.num_requests, classes),
                vocab_size=shape.vocab_size,
                max_position_embeddings=shape.max_position_embeddings,
            )
    with computing_with(plan.num_threads), quiet_transformers():
        machine = describe_machine(device, measure_bandwidth(device))
        report = Report(
            created=created,
            command=plan.command,
            seed=plan.seed,
            num_rounds=plan.num_rounds,
            machine=machine,
            results=[],
        )
        benchmark = _Benchmark(plan, classes, machine.bytes_per_second or 0.0, say)
        for model in models:
            report.results.extend(benchmark.measure(model))
            if keep is not None:
                keep(report)
    return report


class _Benchmark:
    """A running benchmark."""

    def __init__(
        self,
        plan: Plan,
        classes: DecodeClasses,
        bytes_per_second: float,
        say: Callable[[str], None],
    ) -> None:
        self.plan = plan
        self.classes = classes
        self.bytes_per_second = bytes_per_second
        self.say = say

    def measure(self, name: str) -> list[Result]:
        """Run every workload on one model."""
        plan = self.plan
        with model_folder(name, plan.seed) as folder, TemporaryDirectory() as scratch:
            config = _resolved(folder, plan)
            shape = ModelConfig.from_folder(folder)
            facts = model_facts(name, shape, config.dtype)
            workloads = self._workloads(shape.vocab_size)
            trace = Path(scratch) / "trace.jsonl"
            with ExitStack() as stack:
                contenders = self._open(config, facts, workloads, trace, stack)
                taking_part = [
                    [c for c in contenders if c.name in self._names(work)] for work in workloads
                ]
                rounds = [
                    run_rounds(
                        those, work, plan.num_rounds, lambda turn: self.say(f"{name}, {turn}")
                    )
                    for work, those in zip(workloads, taking_part, strict=True)
                ]
            steps = read_steps(read_trace(trace)) if trace.exists() else {}
        return [
            self._result(facts, *parts, steps)
            for parts in zip(workloads, taking_part, rounds, strict=True)
        ]

    def _names(self, workload: Workload) -> tuple[str, ...]:
        """The contenders of a workload; the others are compared with the first."""
        usual = REFERENCES if workload.is_comparison else ()
        return _ENGINES[self.plan.tracing] + (
            usual if self.plan.against is None else self.plan.against
        )

    def _workloads(self, vocab_size: int) -> list[Workload]:
        plan = self.plan
        return [
            workload.first(plan.num_requests)
            for name in plan.workloads
            for workload in make_workloads(name, plan.seed, vocab_size, self.classes)
        ]

    def _open(
        self,
        config: Config,
        model: ModelSize,
        workloads: Sequence[Workload],
        trace: Path,
        stack: ExitStack,
    ) -> list[Contender]:
        """Start the contenders of all workloads, in the order of `_names`."""
        folder = Path(config.model)
        # Exactly the blocks that are needed: two engines share the memory, and none may preempt.
        num_blocks, largest = max(
            (work.num_blocks(config.kvcache_block_size), work.name) for work in workloads
        )
        max_num_seqs = max(config.max_num_seqs, *(len(work.requests) for work in workloads))
        options = _options(self.plan) | {
            "num_kvcache_blocks": num_blocks,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max(config.max_model_len, *(work.longest for work in workloads)),
        }
        names = {name for work in workloads for name in self._names(work)}
        contenders: list[Contender] = []
        num_engines = len(names & {ENGINE, TRACED})
        refusal = BenchmarkError(
            f"{largest} needs {num_blocks} KV blocks of {config.kvcache_block_size} tokens in each "
            "engine, and the memory does not hold them: ask for fewer or shorter requests"
            + (", or for one engine (--trace on)" if num_engines > 1 else "")
        )
        if config.device == "cpu":  # which would allocate it, and then kill the process
            num_bytes = num_blocks * config.kvcache_block_size * model.kv_bytes_per_token
            if num_bytes * num_engines > cpu_memory()[1]:
                raise refusal
        try:
            if ENGINE in names:
                contenders.append(stack.enter_context(running_engine(folder, options)))
            if TRACED in names:
                contenders.append(stack.enter_context(running_engine(folder, options, trace)))
        except KVCacheError as error:
            raise refusal from error
        if names & {*REFERENCES}:
            reference = load_reference(folder, config.device, config.dtype)
            both = (Generate(reference, max_num_seqs), Continuous(reference))
            contenders += [contender for contender in both if contender.name in names]
        return contenders

    def _result(
        self,
        model: ModelSize,
        workload: Workload,
        contenders: Sequence[Contender],
        rounds: Sequence[Round],
        steps: dict[int, StepFacts],
    ) -> Result:
        counted = rounds[1:]
        names = [contender.name for contender in contenders]
        not_compared = _why_not_compared(model.dtype, workload.temperature)
        difference = None if not_compared else first_difference(names, rounds)
        return Result(
            model=model,
            workload=WorkloadFacts(
                name=workload.name,
                num_requests=len(workload.requests),
                num_prompt_tokens=workload.num_prompt_tokens,
                num_output_tokens=workload.num_output_tokens,
                temperature=workload.temperature,
            ),
            contenders=[_contender_facts(c, workload, counted) for c in contenders],
            ratios=ratios(names, counted),
            same_tokens=None if not_compared else difference is None,
            not_compared=not_compared,
            first_difference=difference,
            step_classes=step_classes(
                steps,
                _step_times(counted, TRACED),
                _step_times(counted, ENGINE),
                Floor.of(model, self.bytes_per_second),
            ),
        )


def _models(plan: Plan, device: torch.device) -> tuple[str, ...]:
    """The models of the plan, or the default for the device."""
    if plan.models:
        return plan.models
    return ("0.6b",) if device.type == "cuda" else ("shipped", "50m")


def _decode_classes(plan: Plan, device: torch.device) -> DecodeClasses:
    usual = GPU_CLASSES if device.type == "cuda" else CPU_CLASSES
    return DecodeClasses(
        plan.batch_sizes or usual.batch_sizes, plan.context_lens or usual.context_lens
    )


def _contender_facts(
    contender: Contender, workload: Workload, rounds: Sequence[Round]
) -> ContenderFacts:
    name = contender.name
    seconds = [turn.seconds[name] for turn in rounds]
    return ContenderFacts(
        name=name,
        settings=contender.settings,
        seconds=seconds,
        cores=spread([turn.cpu_seconds[name] / turn.seconds[name] for turn in rounds]),
        tokens_per_second=spread([workload.num_output_tokens / taken for taken in seconds]),
    )


def _step_times(rounds: Sequence[Round], name: str) -> dict[int, int]:
    """Step number -> nanoseconds, of one engine in these rounds."""
    outcomes = [turn.outcomes[name] for turn in rounds if name in turn.outcomes]
    return {step: ns for outcome in outcomes for step, ns in outcome.step_ns.items()}


def _why_not_compared(dtype: str, temperature: float) -> str | None:
    if temperature > 0:
        return f"tokens are sampled, at temperature {temperature:g}"
    if dtype != "float32":
        return f"in {dtype} the most likely token depends on the order of summation"
    return None


def _options(plan: Plan) -> dict[str, Any]:
    return {"device": plan.device, "dtype": plan.dtype, "seed": plan.seed}


def _resolved(folder: Path, plan: Plan) -> Config:
    """The engine's settings for this model, with all "auto"s resolved."""
    return Config.create(folder, _options(plan)).resolve(ModelConfig.from_folder(folder))
