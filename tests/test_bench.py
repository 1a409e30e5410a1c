"""The benchmark: its workloads, its arithmetic, its report, and one tiny run of all contenders."""

from __future__ import annotations

import contextlib
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import randint
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from nanovllm.errors import KVCacheError
from nanovllm.utils.model_config import ModelConfig
from nvtrace import events as ev
from nvtrace.bench import BenchmarkError
from nvtrace.bench import machine as bench_machine
from nvtrace.bench.benchmark import Plan, run_benchmark
from nvtrace.bench.contenders import running_engine
from nvtrace.bench.machine import computing_with, copy_size, describe_machine, measure_bandwidth
from nvtrace.bench.models import SHAPES, model_facts, model_folder, write_random_model
from nvtrace.bench.report import Report, Spread, decode, encode
from nvtrace.bench.rounds import Outcome, Round, first_difference, ratios, run_rounds, spread
from nvtrace.bench.steps import Floor, StepFacts, read_steps, step_classes
from nvtrace.bench.workloads import (
    DecodeClasses,
    Request,
    Workload,
    make_workloads,
    nano_vllm,
    require_fitting,
    uneven,
)
from nvtrace_cli.views.bench import show
from support.cli import call, misfits
from support.examples import example_of
from support.models import VOCAB_SIZE, make_reference, save_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

CLASSES = DecodeClasses((1, 3), (8, 20))
TINY_SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers whose likeliest tokens are likeliest by far; no tokenizer."""
    return save_reference(make_reference(), tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model, and benchmarks that take little time."""
    shorten(monkeypatch)
    return model


def shorten(patch: pytest.MonkeyPatch) -> None:
    """An eighth of the tokens of `uneven`, and copies of a megabyte."""

    def short(seed: int, vocab_size: int) -> Workload:
        work = uneven(seed, vocab_size)
        requests = (Request(r.prompt_token_ids, r.output_len // 8) for r in work.requests)
        return replace(work, requests=tuple(requests))

    patch.setattr("nvtrace.bench.workloads.uneven", short)
    patch.setattr(bench_machine, "copy_size", lambda *_: 2**20)


def hush(_message: str) -> None:
    pass


def fits(name: str, num_requests: int | None = None, **model: int) -> None:
    require_fitting(name, 0, num_requests, CLASSES, **model)


# -- workloads -------------------------------------------------------------------------------------


def test_the_seed_workload_is_nano_vllms_to_the_token() -> None:
    work = nano_vllm(0)
    random.seed(0)
    prompts = [[randint(0, 10000) for _ in range(randint(100, 1024))] for _ in range(256)]
    assert [list(request.prompt_token_ids) for request in work.requests] == prompts
    assert [request.output_len for request in work.requests] == [
        randint(100, 1024) for _ in range(256)
    ]
    assert work.num_output_tokens == 133_966


def test_the_seed_workload_refuses_a_vocabulary_that_is_too_small() -> None:
    with pytest.raises(BenchmarkError, match=r"up to 10000.* has 3072"):
        fits("seed", vocab_size=3072, max_position_embeddings=40_960)


def test_the_uneven_workload_keeps_its_promised_lengths() -> None:
    work = uneven(0, VOCAB_SIZE)
    assert len(work.requests) == 16
    assert all(16 <= len(request.prompt_token_ids) <= 128 for request in work.requests)
    assert all(16 <= request.output_len <= 192 for request in work.requests)
    assert len({request.output_len for request in work.requests}) > 8
    assert {0 <= i < VOCAB_SIZE for r in work.requests for i in r.prompt_token_ids} == {True}


@pytest.mark.parametrize("name", ["uneven", "seed", "decode"])
def test_the_same_seed_draws_the_same_and_another_one_does_not(name: str) -> None:
    def draw(seed: int) -> list[Workload]:
        return make_workloads(name, seed, 20_000, CLASSES)

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_decode_goes_through_every_batch_size_at_every_context() -> None:
    works = make_workloads("decode", 0, VOCAB_SIZE, CLASSES)
    assert [work.name for work in works] == [
        "decode 1 x 8",
        "decode 3 x 8",
        "decode 1 x 20",
        "decode 3 x 20",
    ]
    assert [len(request.prompt_token_ids) for request in works[3].requests] == [20, 20, 20]
    assert works[3].num_output_tokens == 3 * 33


def test_an_unknown_workload_is_named_in_the_refusal() -> None:
    with pytest.raises(BenchmarkError, match="marathon"):
        fits("marathon", vocab_size=VOCAB_SIZE, max_position_embeddings=4096)


@pytest.mark.parametrize(
    ("name", "instead"), [("uneven", "a model with more"), ("decode", "a smaller --context")]
)
def test_a_request_that_is_longer_than_the_model_is_refused(name: str, instead: str) -> None:
    works = make_workloads(name, 0, VOCAB_SIZE, CLASSES)
    longest = max(work.longest for work in works)
    fits(name, vocab_size=VOCAB_SIZE, max_position_embeddings=longest)
    with pytest.raises(BenchmarkError, match=f"takes {longest} .* has {longest - 1}: .*{instead}"):
        fits(name, vocab_size=VOCAB_SIZE, max_position_embeddings=longest - 1)


def test_only_requests_that_run_must_fit() -> None:
    [work] = make_workloads("uneven", 0, VOCAB_SIZE, CLASSES)
    shorter = work.first(2).longest
    assert shorter < work.longest
    fits("uneven", 2, vocab_size=VOCAB_SIZE, max_position_embeddings=shorter)


def test_contexts_without_end_are_refused_without_drawing_them() -> None:
    with pytest.raises(BenchmarkError, match="a smaller --context"):
        require_fitting(
            *("decode", 0, None, DecodeClasses((2**40,), (2**40,))),
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=4096,
        )


def test_a_workload_knows_the_pages_that_hold_it() -> None:
    work = Workload("two", (Request((1, 2, 3), 5), Request((1,) * 16, 1)))
    assert work.num_blocks(8) == 1 + 3
    assert work.first(1).num_blocks(8) == 1
    assert work.first(None) == work


# -- rounds ----------------------------------------------------------------------------------------


class Scribe:
    """A contender that only writes down when its turn was."""

    settings = ""

    def __init__(self, name: str, turns: list[str]) -> None:
        self.name = name
        self.turns = turns

    @contextlib.contextmanager
    def ready(self, workload: Workload) -> Iterator[None]:
        self.turns.append(f"{self.name} for {workload.name}")
        yield

    def run(self, workload: Workload) -> Outcome:
        self.turns.append(self.name)
        return Outcome([[len(workload.requests)]])


def test_contenders_take_turns_and_every_other_round_is_reversed() -> None:
    turns: list[str] = []
    said: list[str] = []
    scribes = [Scribe("a", turns), Scribe("b", turns)]
    rounds = run_rounds(scribes, Workload("w", ()), 2, said.append)
    assert turns[::2] == [f"{name} for w" for name in "abbaab"]
    assert turns[1::2] == [*"abbaab"]
    assert len(rounds) == 3
    assert [line.rpartition(" a ")[0] for line in said if " a " in line] == [
        "w, warming up:",
        "w, round 1 of 2:",
        "w, round 2 of 2:",
    ]


def test_a_spread_is_the_middle_the_lowest_and_the_highest() -> None:
    assert spread([5.0, 1.0, 2.0]) == Spread(2.0, 1.0, 5.0)
    assert spread([1.0, 2.0]) == Spread(1.5, 1.0, 2.0)


def test_ratios_are_taken_within_a_round() -> None:
    # The second round is three times as slow for both: the ratio does not notice.
    rounds = [Round({"ours": 1.0, "theirs": 2.0}), Round({"theirs": 6.0, "ours": 3.0})]
    [ratio] = ratios(["ours", "theirs"], rounds)
    assert (ratio.contender, ratio.against) == ("ours", "theirs")
    assert ratio.times == Spread(2.0, 2.0, 2.0)


def outcomes(**token_ids: list[list[int]]) -> Round:
    return Round(outcomes={name: Outcome(ids) for name, ids in token_ids.items()})


def test_equal_tokens_have_no_difference() -> None:
    rounds = [outcomes(ours=[[1, 2], [3]], theirs=[[1, 2], [3]])] * 2
    assert first_difference(["ours", "theirs"], rounds) is None


@pytest.mark.parametrize(
    ("theirs", "place"),
    [
        ([[1, 2], [4]], (1, 0, 4, 3)),
        ([[1], [3]], (0, 1, None, 2)),
        ([[1, 2, 9], [3]], (0, 2, 9, None)),
    ],
)
def test_the_first_difference_is_found_in_any_round(
    theirs: list[list[int]], place: tuple[int, int, int | None, int | None]
) -> None:
    same = [[1, 2], [3]]
    rounds = [outcomes(ours=same, theirs=same), outcomes(theirs=theirs, ours=same)]
    found = first_difference(["ours", "theirs"], rounds)
    assert found is not None
    assert (found.contender, found.against) == ("theirs", "ours")
    assert (found.request, found.position, found.token_id, found.expected) == place


# -- models and the byte floor ---------------------------------------------------------------------


def config_of(folder: Path, shape: dict[str, int]) -> ModelConfig:
    """The config.json of a random model, as the engine reads it."""
    write_random_model(folder, shape, seed=0)
    return ModelConfig.from_folder(folder)


def test_a_random_model_has_the_parameters_that_its_files_hold(tmp_path: Path) -> None:
    facts = model_facts("tiny", config_of(tmp_path, TINY_SHAPE), "float32")
    # Attention 32 x (32 + 16 + 16 + 32), MLP 3 x 32 x 48, norms 32 + 32 + 8 + 8; twice; and the
    # embedding 128 x 32 with the last norm.
    assert facts.num_parameters == 2 * (3072 + 4608 + 80) + 4096 + 32
    assert facts.weight_bytes == 4 * facts.num_parameters
    assert facts.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4


def test_the_same_seed_writes_the_same_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        write_random_model(tmp_path / name, TINY_SHAPE, seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_an_input_embedding_of_its_own_is_a_parameter_but_not_read(tmp_path: Path) -> None:
    tied = config_of(tmp_path, TINY_SHAPE)
    untied = model_facts("x", replace(tied, tie_word_embeddings=False), "bfloat16")
    assert untied.num_parameters == model_facts("x", tied, "bfloat16").num_parameters + 128 * 32
    assert untied.weight_bytes == model_facts("x", tied, "bfloat16").weight_bytes


def test_the_floor_of_the_article_s_model_is_as_worked_by_hand(tmp_path: Path) -> None:
    changes: dict[str, Any] = dict(SHAPES["0.6b"])
    config = replace(config_of(tmp_path, TINY_SHAPE), **changes)
    facts = model_facts("0.6b", config, "bfloat16")
    assert facts.num_parameters == 596_049_920
    assert facts.weight_bytes == 1_192_099_840
    assert facts.kv_bytes_per_token == 114_688
    floor = Floor.of(facts, bytes_per_second=4.3e12)
    # One sequence of 512 tokens: (1,192,099,840 + 512 x 114,688) / 4.3e12 s = 0.2909 ms.
    assert math.isclose(floor.step_ms(512), 0.29089, rel_tol=1e-4)
    # 256 of 2048: 60.13 GB of keys and values, and the weights once: 14.26 ms.
    assert math.isclose(floor.step_ms(256 * 2048), 14.2611, rel_tol=1e-4)


def test_a_random_model_folder_is_gone_afterwards() -> None:
    with model_folder("50m", seed=0) as folder:
        config = ModelConfig.from_folder(folder)
        assert {f.name for f in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert not folder.exists()
    assert 49e6 < model_facts("50m", config, "float32").num_parameters < 52e6


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(BenchmarkError, match=r"shipped, 50m, 0\.6b.*no such folder"),
        model_folder(str(tmp_path / "nowhere"), seed=0),
    ):
        pass


# -- steps -----------------------------------------------------------------------------------------


def step_of(
    number: int, phase: str, num_seqs: int, parts_ns: tuple[int, int, int, int, int]
) -> ev.StepEnd:
    """The end of a step whose five parts took so long."""
    names = ("schedule_ns", "prepare_ns", "forward_ns", "sample_ns", "postprocess_ns")
    changes: dict[str, Any] = {
        **dict(zip(names, parts_ns, strict=True)),
        "wall_ns": sum(parts_ns),
        "step": number,
        "batch_phase": phase,
        "num_seqs": num_seqs,
        "gpu_ns": None,
    }
    end = example_of(ev.StepEnd)
    assert isinstance(end, ev.StepEnd)
    return msgspec.structs.replace(end, **changes)


def test_steps_are_classed_by_phase_and_powers_of_two() -> None:
    parts = (1, 1, 1, 1, 1)
    ends = [
        step_of(1, "prefill", 7, parts),
        *(step_of(number, "decode", batch, parts) for number, batch in enumerate([7, 4, 3, 1], 2)),
    ]
    steps = {end.step or 0: StepFacts(end, 10) for end in ends}
    classes = step_classes(steps, dict.fromkeys(steps, 10), {}, Floor(1, 1, 1.0))
    assert [(c.phase, c.smallest_batch, c.largest_batch, c.num_steps) for c in classes] == [
        ("prefill", 7, 7, 1),
        ("decode", 1, 1, 1),
        ("decode", 3, 3, 1),
        ("decode", 4, 7, 2),
    ]


def test_a_class_has_medians_shares_and_its_distance_from_the_floor() -> None:
    # Three equal steps of 8 ms and one that was disturbed in its model part.
    parts = (1_000_000, 1_000_000, 4_000_000, 1_000_000, 500_000)
    ends = [step_of(number, "decode", 2, parts) for number in (1, 2, 3)]
    ends.append(step_of(4, "decode", 2, (1_000_000, 1_000_000, 90_000_000, 1_000_000, 500_000)))
    steps = {end.step or 0: StepFacts(end, 1000) for end in ends}
    traced = {1: 8_000_000, 2: 8_000_000, 3: 8_000_000, 4: 94_000_000}
    untraced = {1: 6_000_000, 2: 6_000_000, 3: 6_000_000, 4: 6_000_000}
    # 2 MB of weights and 1000 tokens of 2 KB each, at 1 GB/s: 4 ms.
    [found] = step_classes(steps, traced, untraced, Floor(2_000_000, 2000, 1e9))
    assert (found.traced_ms, found.untraced_ms, found.floor_ms) == (8.0, 6.0, 4.0)
    assert (found.traced_times_floor, found.untraced_times_floor) == (2.0, 1.5)
    assert found.gpu_ms is None
    shares = msgspec.structs.asdict(found.shares)
    assert math.isclose(sum(shares.values()), 1.0)
    assert shares["schedule"] == 0.125
    assert shares["model"] == 0.5
    assert shares["rest"] == 0.0625


def test_steps_of_rounds_that_do_not_count_are_left_out() -> None:
    steps = {number: StepFacts(step_of(number, "decode", 1, (1,) * 5), 1) for number in (1, 2)}
    [found] = step_classes(steps, {2: 10}, {}, Floor(1, 1, 1.0))
    assert found.num_steps == 1
    assert found.untraced_ms is None
    assert found.untraced_times_floor is None


def test_a_traces_steps_come_with_their_contexts() -> None:
    prepared = example_of(ev.PrepareDecodeTensors)
    assert isinstance(prepared, ev.PrepareDecodeTensors)
    records: list[Any] = [
        step_of(1, "prefill", 2, (1,) * 5),
        msgspec.structs.replace(prepared, step=2, context_lens=[5, 7]),
        step_of(2, "decode", 2, (1,) * 5),
    ]
    found = read_steps(records)
    assert {number: facts.num_context_tokens for number, facts in found.items()} == {1: None, 2: 12}


# -- the machine -----------------------------------------------------------------------------------


def test_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    machine = describe_machine(torch.device("cpu"), 1e9)
    assert machine.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert machine.versions.keys() == {"python", "torch", "transformers", "nanovllm"}
    assert machine.processor
    assert (machine.device, machine.bytes_per_second) == ("cpu", 1e9)
    assert machine.wait_policy == "PASSIVE"


def test_a_copy_moves_bytes() -> None:
    assert measure_bandwidth(torch.device("cpu")) > 0


class StandInGpu:
    """Copies take time by its own clock; the host's clock knows nothing of that."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.num_copies = 0

    def copy(self, *_: object) -> None:
        """One copy: 2 ms, or 5 where something else has the memory (every fourth ten)."""
        self.now_ms += 5.0 if self.num_copies // 10 % 4 == 3 else 2.0
        self.num_copies += 1

    def mark(self, *, enable_timing: bool) -> StandInMark:
        """What takes the time."""
        assert enable_timing
        return StandInMark(self)


class StandInMark:
    """A `torch.cuda.Event`, as far as it is asked."""

    def __init__(self, gpu: StandInGpu) -> None:
        self.gpu, self.ms, self.is_waited_for = gpu, -1.0, False

    def record(self) -> None:
        self.gpu.now_ms += 1e-3  # a launch, once a try
        self.ms = self.gpu.now_ms

    def synchronize(self) -> None:
        self.is_waited_for = True

    def elapsed_time(self, later: StandInMark) -> float:
        assert later.is_waited_for
        return later.ms - self.ms


def test_a_gpus_copies_are_timed_by_its_own_clock_ten_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = StandInGpu()
    monkeypatch.setattr(bench_machine, "copy_size", lambda *_: 1000)
    monkeypatch.setattr(torch.Tensor, "copy_", gpu.copy)
    found = measure_bandwidth(torch.device("cpu"), num_copies=10, new_event=gpu.mark)
    assert gpu.num_copies == 80
    assert math.isclose(
        found, 2 * 1000 / 2e-3, rel_tol=1e-3
    )  # the best try's, launches hardly count


@pytest.mark.parametrize(
    ("device_type", "free_bytes", "expected"),
    [
        ("cuda", 140 * 1024**3, 4 * 1024**3),
        ("cuda", 8 * 1024**3, 2 * 1024**3),  # as large as fits
        ("cpu", 64 * 1024**3, 256 * 1024**2),
        ("cpu", 100 * 1024**2, 25 * 1024**2),
        ("cpu", 0, 1),
    ],
)
def test_a_copy_is_as_large_as_fits(device_type: str, free_bytes: int, expected: int) -> None:
    assert copy_size(device_type, free_bytes) == expected


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with computing_with(before + 1):
        assert torch.get_num_threads() == before + 1
    with computing_with(None):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before


# -- a run -----------------------------------------------------------------------------------------


def test_the_engine_does_not_find_the_last_rounds_prompts_in_its_cache(folder: Path) -> None:
    work = Workload("w", (Request(tuple(range(1, 20)), 4),))
    options = {"kvcache_block_size": 4, "num_kvcache_blocks": 16}
    with running_engine(folder, options) as engine:
        for _ in range(2):
            with engine.ready(work):
                outcome = engine.run(work)
            assert engine.llm.prefix_cache_stats().num_hit_tokens == 0
    assert [len(ids) for ids in outcome.token_ids] == [4]
    assert sorted(outcome.step_ns) == [5, 6, 7, 8]  # of the second round


@pytest.fixture(scope="module")
def report(model: Path) -> Report:
    """All contenders on two requests of `uneven`, and one class of `decode`."""
    plan = Plan(
        workloads=("uneven", "decode"),
        models=(str(model),),
        num_rounds=1,
        num_requests=2,
        num_threads=1,
        batch_sizes=(2,),
        context_lens=(24,),
        command="nvtrace bench",
    )
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        return run_benchmark(plan, hush)


def test_all_contenders_generate_the_same_tokens(report: Report) -> None:
    names = [[contender.name for contender in result.contenders] for result in report.results]
    engines = ["engine", "engine traced"]
    assert names == [[*engines, "generate", "continuous"], engines]
    assert [result.same_tokens for result in report.results] == [True, True]
    assert [result.first_difference for result in report.results] == [None, None]


def test_every_other_contender_has_its_ratio(report: Report) -> None:
    result = report.results[0]
    assert [ratio.against for ratio in result.ratios] == ["engine traced", "generate", "continuous"]
    ours, *_, continuous = (contender.seconds[0] for contender in result.contenders)
    assert math.isclose(result.ratios[-1].times.median, continuous / ours)
    rate = result.contenders[0].tokens_per_second.median
    assert math.isclose(rate, result.workload.num_output_tokens / ours)


def test_the_steps_of_a_run_are_found_in_its_trace(report: Report) -> None:
    prefill, decode_ = report.results[1].step_classes
    assert (prefill.phase, prefill.num_steps, prefill.floor_ms) == ("prefill", 1, None)
    assert (decode_.phase, decode_.num_steps) == ("decode", 32)
    assert decode_.smallest_batch == decode_.largest_batch == 2
    # The median of contexts 2 x 25, 2 x 26, ... 2 x 56 is 81.
    model, machine = report.results[1].model, report.machine
    num_bytes = model.weight_bytes + 81 * model.kv_bytes_per_token
    assert decode_.floor_ms is not None
    assert machine.bytes_per_second is not None
    assert math.isclose(decode_.floor_ms, num_bytes / machine.bytes_per_second * 1e3)


def test_a_report_comes_back_from_its_json(report: Report) -> None:
    assert decode(encode(report)) == report
    schema = msgspec.json.schema(Report)
    assert schema["$ref"] == "#/$defs/Report"


def test_drawn_tokens_and_short_floats_are_not_compared(folder: Path) -> None:
    plan = Plan(models=(str(folder),), against=(), num_rounds=1, num_requests=1, dtype="bfloat16")
    [result] = run_benchmark(plan, hush).results
    assert result.same_tokens is None
    assert result.not_compared is not None
    assert "bfloat16" in result.not_compared


def decodes(folder: Path, batch_size: int, context_len: int) -> Plan:
    """One step class, one round, both engines."""
    return Plan(
        workloads=("decode",),
        models=(str(folder),),
        against=(),
        num_rounds=1,
        batch_sizes=(batch_size,),
        context_lens=(context_len,),
    )


def test_a_batch_beyond_the_engines_usual_one_is_one_step(folder: Path) -> None:
    plan = replace(decodes(folder, 520, 1), tracing="on")
    [result] = run_benchmark(plan, hush).results
    classes = [some for some in result.step_classes if some.phase == "decode"]
    assert [(some.largest_batch, some.num_steps) for some in classes] == [(520, 32)]


def test_contexts_beyond_the_engines_usual_length_run(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_SHAPE, seed=0)
    plan = replace(decodes(tmp_path, 1, 4096), tracing="off")
    [result] = run_benchmark(plan, hush).results
    assert result.workload.num_prompt_tokens == 4096


def test_memory_that_does_not_hold_a_workload_is_said_in_its_own_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise KVCacheError("lower num_kvcache_blocks")

    monkeypatch.setattr("nvtrace.bench.benchmark.running_engine", refuse)
    plan = replace(decodes(folder, 3, 300), batch_sizes=(3, 9))
    with pytest.raises(BenchmarkError, match=r"decode 9 x 300 needs 18 KV blocks .* fewer or shor"):
        run_benchmark(plan, hush)


# -- the command -----------------------------------------------------------------------------------


def bench(
    capsys: pytest.CaptureFixture[str], folder: Path, *options: str | Path
) -> tuple[int, str, str]:
    """`nvtrace bench` on one request, one round, untraced and traced."""
    fixed = ("--model", folder, "--rounds", "1", "--requests", "2", "--against", "generate")
    outcome = call(capsys, "bench", *fixed, *options)
    return outcome.code, outcome.out, outcome.err


def test_the_command_gives_json_and_writes_the_same(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    code, text, said = bench(capsys, folder, "--json", "--out", out, "--threads", "1")
    assert code == 0
    found = decode(text.encode())
    assert found == decode(out.read_bytes())
    assert found.results[0].same_tokens is True
    assert found.machine.num_threads == 1
    assert "warming up: generate" in said
    assert str(out) in said


def test_the_tables_fit_80_columns_and_name_every_contender(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, text, said = bench(capsys, folder, "--quiet")
    assert (code, said) == (0, "")
    assert max(map(len, text.splitlines())) <= 80
    for word in ("engine traced", "generate", "same tokens", "decode", "floor", "schedule"):
        assert word in text


def test_the_tables_fit_any_terminal_and_cut_no_number(
    report: Report, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(columns: str) -> str:
        monkeypatch.setenv("COLUMNS", columns)
        show(report)
        return capsys.readouterr().out

    wide = shown("400")
    for width in (40, 43, 50, 57, 60, 70, 80, 100, 120):
        assert misfits(shown(str(width)), wide, width) == []
    assert {shown(size) for size in ("0", "-1", "abc", "1000000")} == {shown("80")}
    assert {shown(size) for size in ("1", "5", "19")} == {shown("40")}
    assert "engine traced" in shown("40")


def test_plain_has_two_tables_with_tabs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = bench(capsys, folder, "--plain", "--trace", "on")
    assert code == 0
    contenders, steps = (table.splitlines() for table in text.split("\n\n"))
    assert [line.split("\t")[2] for line in contenders[1:]] == ["engine traced", "generate"]
    assert {len(line.split("\t")) for line in contenders} == {8}
    assert {len(line.split("\t")) for line in steps} == {16}
    assert {line.split("\t")[6] for line in steps[1:]} == {"-"}  # no untraced engine ran


def test_a_report_that_cannot_be_written_is_still_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, said = bench(capsys, folder, "--plain", "--out", "/dev/full")
    assert code == 5
    assert "engine traced" in text
    assert "/dev/full cannot be written (No space left on device)" in said


SMALL_COPIES = """
from nvtrace.bench import machine
from nvtrace_cli.main import main
machine.copy_size = lambda *_: 2**20
main()
"""


@pytest.mark.parametrize(("options", "code"), [(["--out", "/dev/full"], 5), ([], 74)])
def test_the_failure_is_said_though_stdout_is_full(
    options: list[str], code: int, folder: Path
) -> None:
    command = [sys.executable, "-c", SMALL_COPIES, "bench", "--model", str(folder)]
    few = ["decode", "--batch", "1", "--context", "8", "--rounds", "1", "--quiet"]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        ended = subprocess.run(
            [*command, *few, *options], check=False, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (ended.returncode, ended.stderr.count("\n")) == (code, 1)
    assert ("/dev/full cannot be written" in ended.stderr) == (code == 5)


def test_two_engines_must_fit_into_the_memory_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_token = model_facts("m", ModelConfig.from_folder(folder), "float32").kv_bytes_per_token
    monkeypatch.setattr("nvtrace.bench.benchmark.cpu_memory", lambda: (2**40, 3 * 256 * per_token))
    both = decodes(folder, 2, 9)
    with pytest.raises(BenchmarkError, match=r"2 KV blocks .* memory does not hold them"):
        run_benchmark(both, hush)
    [result] = run_benchmark(replace(both, tracing="on"), hush).results
    assert len(result.contenders) == 1


def test_what_a_later_model_breaks_is_not_all_that_was_measured(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    out = tmp_path / "report.json"
    code, text, said = bench(capsys, folder, "--json", "--out", out, "--model", tmp_path)
    assert code == 5
    assert "safetensors" in said
    [result] = decode(text.encode()).results
    assert result.model.name == str(folder)
    assert decode(out.read_bytes()).results == [result]


def test_a_later_model_that_cannot_be_asked_is_refused_before_the_first_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for later in ("no/such/model", "shipped"):
        code, text, said = bench(capsys, folder, "seed", "--model", later)
        assert (code, text, said.count("\n")) == (2, "", 1)


def test_a_report_is_in_its_file_if_nobody_reads_the_table(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody_reads(_report: Report) -> None:
        raise RuntimeError("closed")

    monkeypatch.setattr("nvtrace_cli.views.bench.print_plain", nobody_reads)
    out = tmp_path / "report.json"
    code, _, _ = bench(capsys, folder, "--plain", "--out", out)
    assert code == 70
    assert len(decode(out.read_bytes()).results) == 1


def test_without_a_trace_there_are_no_step_classes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text, _ = bench(capsys, folder, "--json", "--trace", "off")
    [result] = decode(text.encode()).results
    assert result.step_classes == []
    assert [contender.name for contender in result.contenders] == ["engine", "generate"]


def test_other_tokens_end_with_code_1(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_wrongly(_self: object, workload: Workload) -> Outcome:
        return Outcome([[0] * request.output_len for request in workload.requests])

    monkeypatch.setattr("nvtrace.bench.contenders.Generate.run", run_wrongly)
    code, text, _ = bench(capsys, folder)
    assert code == 1
    assert "Not the same tokens: request 0, token 0 of generate is 0" in " ".join(text.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["marathon"], "marathon"),
        (["--json", "--plain"], "--plain"),
        (["--batch", "4"], "nvtrace bench decode"),
        (["seed", "--context", "4"], "nvtrace bench decode"),
        (["--rounds", "0"], "--rounds"),
        (["--against", "vllm"], "--against vllm"),
        (["--against", ""], "--against"),
        (["--out", "no/such/folder/r.json"], "no/such/folder"),
        (["--out", "."], "--out"),
        (["--device", "abacus"], "abacus"),
        (["--model", "no/such/model"], "no/such/model"),
        (["seed", "--model", "shipped"], "vocabulary has 3072"),
        (["decode", "--model", "shipped", "--context", "4064"], "a smaller --context"),
        (["decode", "--model", "0.6b", "--batch", "4096", "--context", "131072"], "40960"),
        (["--out", "a" * 300], "too long"),
        (["--model", "a" * 300], "no such folder"),
        (["--model", "~nobody-of-that-name/model"], "no such folder"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "bench", *options)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1
    assert said in outcome.err


def test_a_folder_that_holds_no_model_is_a_failed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "bench", "--model", tmp_path, "--rounds", "1")
    assert (outcome.code, outcome.out) == (5, "")
    assert "config.json" in outcome.err
