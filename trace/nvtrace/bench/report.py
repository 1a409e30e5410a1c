"""The report: the results of a benchmark, as structs that are its JSON.

Times are in `seconds` or end in `_ms`; a share is between 0 and 1. What was not measured is None.
"""

from __future__ import annotations

import msgspec

SCHEMA = "nvtrace-bench"
VERSION = (1, 0)


class Spread(msgspec.Struct, frozen=True):
    """A value over all rounds: the median, the lowest and the highest."""

    median: float
    low: float
    high: float


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that it ran on.

    Attributes:
        processor: the CPU's name.
        num_threads: CPU threads that torch used, for every contender.
        device: that the models ran on: "cpu", or the GPU's name.
        bytes_per_second: bandwidth of large copies on that device, read and written; None if no
            step was measured.
        load_average: processes that needed a core in the minute before. If the sum with
            `num_threads` is above `num_cpus`, the machine was busy with other work.
        wait_policy: OMP_WAIT_POLICY: whether waiting threads sleep ("PASSIVE") or spin.
        versions: of Python, torch, transformers and nanovllm.
        commit: of the checkout, with "-dirty" if files were changed; None without one.
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


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """The model.

    Attributes:
        num_parameters: a tied head counts once.
        dtype: of the weights and of the KV cache, for every contender.
        weight_bytes: that a decode step reads of the weights.
        kv_bytes_per_token: that it reads of the KV cache, for each token of each context.
    """

    name: str
    num_parameters: int
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int


class WorkloadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The workload. Temperature 0 takes the most likely token."""

    name: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    temperature: float


class ContenderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one contender.

    Attributes:
        settings: its own settings.
        seconds: of each counted round.
        cores: CPU time divided by time: how many cores it used.
        tokens_per_second: requested output tokens. Padding, and tokens that are generated beyond a
            request's length, are not counted.
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
    """The first token that differs between two contenders; None if an answer has ended."""

    contender: str
    against: str
    request: int
    position: int
    token_id: int | None
    expected: int | None


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the time of a traced step; they add up to 1.

    Attributes:
        model: the forward pass; on a GPU, launching it.
        rest: outside the times in the trace: writing the trace, returning outputs.
    """

    schedule: float
    prepare: float
    model: float
    sample: float
    postprocess: float
    rest: float


class StepClass(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one phase with a similar number of sequences.

    Attributes:
        smallest_batch, largest_batch: lowest and highest number of sequences in a step.
        untraced_ms, traced_ms: the median step; None if that contender did not run.
        gpu_ms: the time on the GPU; None on a CPU.
        floor_ms: the bytes that the median decode step must read, divided by the bandwidth. None
            for other phases: they are limited by arithmetic.
        untraced_times_floor, traced_times_floor: the median step divided by the floor.
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
        same_tokens: did all contenders generate the same tokens, in every round? None if this was
            not compared; `not_compared` says why.
    """

    model: ModelSize
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
        command: the command line.
        created: when it began, ISO 8601 with zone.
        seed: of prompts, lengths and random weights.
        num_rounds: counted rounds; there was one warm-up round before them.
    """

    schema: str = SCHEMA
    version: tuple[int, int] = VERSION
    created: str
    command: str
    seed: int
    num_rounds: int
    machine: MachineFacts
    results: list[Result]


def encode(report: Report) -> bytes:
    """The report as JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def decode(data: bytes) -> Report:
    """JSON -> report. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(data, type=Report)
