"""The report: what a benchmark found, as structs that are its JSON.

Knows names, units and how the parts belong together. Does not measure, and does not know how it
looks (`nvtrace_cli.views.bench`). A time ends in `_ms` or is in `seconds`; a share is between 0
and 1. What was not measured is None.
"""

from __future__ import annotations

import msgspec

SCHEMA = "nvtrace-bench"
VERSION = (1, 0)


class Spread(msgspec.Struct, frozen=True):
    """One number of every round: the middle one, the lowest and the highest."""

    median: float
    low: float
    high: float


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it ran.

    Attributes:
        processor: the CPU's name.
        num_threads: CPU threads that torch computed with, for every contender.
        device: what the models ran on: "cpu", or the GPU's name.
        bytes_per_second: what large copies on that device moved, read and written; None if no step
            was looked at.
        load_average: processes that wanted a core in the minute before. With `num_threads` they
            should not exceed `num_cpus`, or the figures are of a busy machine.
        wait_policy: OMP_WAIT_POLICY: whether threads that wait sleep ("PASSIVE") or spin.
        versions: of Python, torch, transformers and nanovllm.
        commit: of the checkout it ran from, "-dirty" if files were changed; None without one.
    """

    processor: str
    platform: str
    num_cpus: int
    num_threads: int
    device: str
    bytes_per_second: float | None
    load_average: float | None
    wait_policy: str | None
    versions: dict[str, str]
    commit: str | None


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is run.

    Attributes:
        num_parameters: a tied head counted once.
        dtype: of the weights and of the KV cache, for every contender.
        weight_bytes: what a decode step reads of the weights.
        kv_bytes_per_token: what it reads of the KV cache, for each token of each context.
    """

    name: str
    num_parameters: int
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int


class WorkloadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for. Temperature 0 takes the most likely token."""

    name: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    temperature: float


class ContenderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How one contender did.

    Attributes:
        settings: what is particular to how it ran.
        seconds: of each round that counts.
        cores: CPU time by time: how many cores it kept busy, or was given on a busy machine.
        tokens_per_second: useful tokens: those that were asked for. Padding, and what is generated
            beyond a request's length, is not counted.
    """

    name: str
    settings: str
    seconds: list[float]
    cores: Spread
    tokens_per_second: Spread


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """How many times as fast `contender` was as `against`, both in the same round."""

    contender: str
    against: str
    times: Spread


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first token in which two contenders do not agree; None where an answer has ended."""

    contender: str
    against: str
    request: int
    position: int
    token_id: int | None
    expected: int | None


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a traced step went; the shares add up to 1.

    Attributes:
        model: the forward pass; on a GPU, launching it.
        rest: outside the step's own account: writing the trace, handing out answers.
    """

    schedule: float
    prepare: float
    model: float
    sample: float
    postprocess: float
    rest: float


class StepClass(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one phase with about as many sequences.

    Attributes:
        smallest_batch, largest_batch: sequences in a step of this class, at least and at most.
        untraced_ms, traced_ms: the median step; None where that contender did not run.
        gpu_ms: the device's own time, None on a CPU.
        floor_ms: the bytes that a decode step must read, over the bandwidth; the median step's.
            None for other phases: they are bound by arithmetic.
        untraced_times_floor, traced_times_floor: the median step by the floor.
    """

    phase: str
    smallest_batch: int
    largest_batch: int
    num_steps: int
    untraced_ms: float | None
    traced_ms: float | None
    gpu_ms: float | None
    floor_ms: float | None
    untraced_times_floor: float | None
    traced_times_floor: float | None
    shares: Shares


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One workload on one model.

    Attributes:
        same_tokens: did all contenders generate the same, in every round? None if that was not to
            be expected, and `not_compared` says why.
    """

    model: ModelFacts
    workload: WorkloadFacts
    contenders: list[ContenderFacts]
    ratios: list[Ratio]
    same_tokens: bool | None
    not_compared: str | None
    first_difference: Difference | None
    step_classes: list[StepClass]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole benchmark.

    Attributes:
        command: what was typed.
        created: when it began, ISO 8601 with zone.
        seed: of prompts, lengths and random weights.
        num_rounds: those that count; one more went before, and was dropped.
    """

    schema: str = SCHEMA
    version: tuple[int, int] = VERSION
    created: str
    command: str
    seed: int
    num_rounds: int
    machine: Machine
    results: list[Result]


def encode(report: Report) -> bytes:
    """The report as JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def decode(data: bytes) -> Report:
    """JSON -> report. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(data, type=Report)
