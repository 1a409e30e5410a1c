"""Tensor parallelism: the same tokens from any number of ranks, and an end to every failure."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nanovllm import LLM, Observer, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.kv_cache import estimate_budget
from nanovllm.errors import WeightsError, WorkerError
from nanovllm.gpu.attention_choice import make_attention_backend
from nanovllm.layers.sampler import Sampler
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.parallel.interrupts import interrupts_deferred
from nanovllm.parallel.ranks import Ranks
from nanovllm.parallel.tensor_parallel import ALONE, TensorParallel
from nanovllm.parallel.torchrun import TorchrunRank
from nanovllm.utils.loader import load_model
from nanovllm.utils.model_config import ModelConfig
from support.cli import environment
from support.models import make_reference, random_tokens, save_reference
from support.oracle import Oracle, assert_empty, greedy_params, make_llm, tokens_of
from support.ranks import (
    PATIENCE,
    Chief,
    Deed,
    Plot,
    are_gone,
    is_running,
    noting_workers,
    start_script,
    worker_pids,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from subprocess import Popen

    from torch import Tensor

    from nanovllm.layers.sampler import SamplingTensors

pytestmark = pytest.mark.slow

MAX_TOKENS = 12


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """2 KV heads, a vocabulary that no number of ranks divides, a head of its own."""
    changes = {"vocab_size": 131, "tie_word_embeddings": False}
    return Oracle.create(tmp_path_factory.mktemp("plain"), changes)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """1 KV head, which every rank must have; the head is the embedding."""
    changes = {"num_key_value_heads": 1, "tie_word_embeddings": True}
    return Oracle.create(tmp_path_factory.mktemp("narrow"), changes)


# -- who holds what: no processes ------------------------------------------------------------------


def ranks_of(world_size: int) -> list[TensorParallel]:
    """Each rank's place, without a group."""
    return [TensorParallel(rank, world_size) for rank in range(world_size)]


def part_of(folder: Path, parallel: TensorParallel) -> Qwen3ForCausalLM:
    """One rank's model, filled from a checkpoint."""
    backend = make_attention_backend("sdpa")
    model = Qwen3ForCausalLM(ModelConfig.from_folder(folder), backend, parallel)
    for name, parameter in model.named_parameters():
        if "embed" not in name and "lm_head" not in name:  # those have padding
            parameter.fill_(torch.nan)
    load_model(model, folder)
    return model


@pytest.mark.parametrize(("kv_heads", "world_size"), [(2, 2), (1, 2), (2, 4), (4, 4), (4, 1)])
@pytest.mark.parametrize("is_tied", [False, True])
def test_each_rank_loads_its_part_of_every_weight(
    tmp_path: Path, kv_heads: int, world_size: int, *, is_tied: bool
) -> None:
    changes = {
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": is_tied,
        "vocab_size": 131,
        "num_hidden_layers": 1,
    }
    folder = save_reference(make_reference(changes), tmp_path)
    whole = load_file(folder / "model.safetensors")
    layer = "model.layers.0."
    head = "model.embed_tokens" if is_tied else "lm_head"
    num_rows = -(-131 // world_size)
    num_copies = max(1, world_size // kv_heads)

    def rows(name: str, rank: int, num_parts: int) -> Tensor:
        return whole[f"{name}.weight"].chunk(num_parts, dim=0)[rank]

    def columns(name: str, rank: int) -> Tensor:
        return whole[f"{name}.weight"].chunk(world_size, dim=1)[rank]

    for rank, parallel in enumerate(ranks_of(world_size)):
        held = dict(part_of(folder, parallel).named_parameters())
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
        kv_rank, num_kv_parts = rank // num_copies, world_size // num_copies
        qkv = [
            rows(f"{attention}q_proj", rank, world_size),
            rows(f"{attention}k_proj", kv_rank, num_kv_parts),
            rows(f"{attention}v_proj", kv_rank, num_kv_parts),
        ]
        gate_up = [rows(f"{mlp}{name}_proj", rank, world_size) for name in ("gate", "up")]
        assert torch.equal(held[f"{attention}qkv_proj.weight"], torch.cat(qkv))
        assert torch.equal(held[f"{mlp}gate_up_proj.weight"], torch.cat(gate_up))
        for name in (f"{attention}o_proj", f"{mlp}down_proj"):
            assert torch.equal(held[f"{name}.weight"], columns(name, rank))
        for name in {"model.embed_tokens", head}:
            mine = whole[f"{name}.weight"][rank * num_rows : (rank + 1) * num_rows]
            assert torch.equal(held[f"{name}.weight"][: len(mine)], mine)
            assert not held[f"{name}.weight"][len(mine) :].any()
        for name in ("model.norm", f"{layer}input_layernorm", f"{attention}q_norm"):
            assert torch.equal(held[f"{name}.weight"], whole[f"{name}.weight"])


def test_a_rank_whose_part_of_the_vocabulary_is_all_padding_loads_nothing_into_it(
    tmp_path: Path,
) -> None:
    folder = save_reference(make_reference({"vocab_size": 5, "num_hidden_layers": 1}), tmp_path)
    model = part_of(folder, TensorParallel(rank=3, world_size=4))
    assert model.lm_head.weight.shape == (2, 64)
    assert not model.lm_head.weight.any()


def test_a_rank_reads_no_more_of_a_tensor_than_its_part(
    plain: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank holds in parts, it never asks for whole."""
    whole: list[str] = []

    class Watched:
        def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - safe_open's
            self.file: Any = safe_open(*arguments, **options)

        def __enter__(self) -> Self:
            self.file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> object:
            whole.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr("nanovllm.utils.loader.safe_open", Watched)
    part_of(plain.folder, TensorParallel(rank=1, world_size=2))
    assert whole
    assert all("norm" in name for name in whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_refuses_a_wrong_checkpoint(plain: Oracle, tmp_path: Path, rank: int) -> None:
    parallel = TensorParallel(rank, 2)
    tensors = load_file(plain.folder / "model.safetensors")
    (tmp_path / "config.json").write_bytes((plain.folder / "config.json").read_bytes())
    name = "model.layers.0.self_attn.o_proj.weight"
    for wrong in (tensors[name][:, :32].clone(), None):  # a rank's share is no whole tensor
        changed = {**tensors, name: wrong} if wrong is not None else tensors.copy()
        if wrong is None:
            del changed[name]
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(WeightsError, match=r"self_attn\.o_proj"):
            part_of(tmp_path, parallel)


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        ({}, 3, "divide num_attention_heads=4; it can be split by 1, 2, 4"),
        ({"intermediate_size": 98}, 4, "divide intermediate_size=98; it can be split by 1, 2"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            3,
            "num_key_value_heads=2 divides the other; it can be split by 1, 2, 6",
        ),
    ],
)
def test_a_model_that_cannot_be_split_evenly_is_refused_with_the_numbers(
    tmp_path: Path, changes: dict[str, object], world_size: int, message: str
) -> None:
    folder = save_reference(make_reference({"num_hidden_layers": 1, **changes}), tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        LLM(folder, tensor_parallel_size=world_size)
    assert f"tensor_parallel_size={world_size}" in str(caught.value)


def test_a_world_of_one_has_no_group_and_its_collectives_do_nothing() -> None:
    x = torch.ones(2, 3)
    assert ALONE.group is None
    assert ALONE.all_reduce(x) is x
    assert ALONE.gather(x) is x
    assert ALONE.min(5) == 5
    assert ALONE.broadcast("word") == "word"


def test_ranks_on_one_machine_share_the_room_for_blocks(plain: Oracle) -> None:
    config = Config.create(plain.folder, {"kvcache_block_size": 16, "dtype": "float32"})
    model = replace(ModelConfig.from_folder(plain.folder), num_key_value_heads=4)
    alone = estimate_budget(config, model, Ranks(ALONE))
    halves = estimate_budget(config, model, Ranks(TensorParallel(0, 2), 2))
    assert (alone.num_kv_heads, halves.num_kv_heads) == (4, 2)
    assert halves.block_bytes * 2 == alone.block_bytes
    assert halves.limit_bytes is not None
    room = min(int(halves.total_bytes * 0.9) - halves.used_bytes, halves.limit_bytes)
    assert halves.available_bytes == room // 2
    assert halves.num_blocks == halves.available_bytes // halves.block_bytes


# -- the environment of a launcher -----------------------------------------------------------------

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_a_launcher_is_known_by_its_four_variables() -> None:
    assert TorchrunRank.from_environment(TORCHRUN) == TorchrunRank(1, 4, 1, 4)
    local = TORCHRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert TorchrunRank.from_environment(local) == TorchrunRank(1, 4, 0, 1)
    for name in TORCHRUN:
        assert TorchrunRank.from_environment(TORCHRUN | {name: ""}) is None
    assert TorchrunRank.from_environment({}) is None


@pytest.mark.parametrize("changes", [{"RANK": "one"}, {"WORLD_SIZE": "-2"}, {"RANK": "4"}])
def test_a_launcher_that_makes_no_sense_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        TorchrunRank.from_environment(TORCHRUN | changes)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_another_number_of_ranks_than_the_launchers_is_refused(
    plain: Oracle, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"tensor_parallel_size={num_ranks}.*WORLD_SIZE=4"):
        make_llm(plain.folder, tensor_parallel_size=num_ranks)


def test_a_launch_of_one_process_needs_no_group(
    narrow: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    prompt = narrow.prompts([5], 3)[0]
    outputs = make_llm(narrow.folder).generate([prompt], greedy_params(3))
    assert tokens_of(outputs) == [narrow.greedy(prompt, 3)]


# -- Ctrl-C ----------------------------------------------------------------------------------------


def test_ctrl_c_waits_for_the_end_of_a_block_and_strikes_then() -> None:
    reached = []

    def work() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            reached.append("the end")
        reached.append("what comes after")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# -- the same tokens -------------------------------------------------------------------------------


@dataclass
class Pair:
    """Two engines at once, each of two processes."""

    plain: LLM
    narrow: LLM
    pids: set[int]


@pytest.fixture(scope="module")
def pair(plain: Oracle, narrow: Oracle) -> Iterator[Pair]:
    options: dict[str, Any] = {"tensor_parallel_size": 2, "max_num_batched_tokens": 7}
    with noting_workers() as pids:
        first = make_llm(plain.folder, **options)
        second = make_llm(narrow.folder, **options)
    yield Pair(first, second, pids)
    for _ in range(2):  # twice is no more than once
        first.exit()
    assert len(pids & worker_pids()) == 1
    second.exit()
    assert not any(map(is_running, pids))
    with pytest.raises(WorkerError, match=r"make a new LLM: exit\(\) was called"):
        first.generate([[1]], greedy_params(1))
    assert_empty(first)


def check(llm: LLM, oracle: Oracle, lengths: list[int], seed: int) -> None:
    """Do chunks, a shared prefix and a mixed batch come out as transformers computes them?"""
    prompts = oracle.prompts(lengths, MAX_TOKENS, seed)
    prompts.append(prompts[-1])
    expected = [oracle.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    for _ in range(2):  # the second time from cached pages
        assert tokens_of(llm.generate(prompts, greedy_params(MAX_TOKENS))) == expected
    assert_empty(llm)


def test_two_engines_of_two_ranks_give_the_tokens_of_one(
    pair: Pair, plain: Oracle, narrow: Oracle
) -> None:
    assert len(pair.pids) == 2
    check(pair.plain, plain, [1, 3, 9, 20], seed=1)
    check(pair.narrow, narrow, [2, 16, 25], seed=2)
    check(pair.plain, plain, [30], seed=3)


def test_sampling_is_rank_0s_and_the_same_as_alone(pair: Pair, plain: Oracle) -> None:
    params = [
        replace(greedy_params(8), temperature=0.7, seed=seed, top_k=top_k)
        for seed, top_k in ((1, None), (2, 5))
    ]
    prompts = [random_tokens(n, seed=n) for n in (4, 11)]
    alone = make_llm(plain.folder, max_num_batched_tokens=7).generate(prompts, params)
    assert tokens_of(pair.plain.generate(prompts, params)) == tokens_of(alone)


def test_no_padding_of_the_vocabulary_can_be_sampled(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks hold 66 rows each, and the vocabulary has 131."""
    widths, forward = [], Sampler.forward

    def watched(sampler: Sampler, logits: Tensor, params: SamplingTensors) -> Tensor:
        widths.append(logits.shape[-1])
        return forward(sampler, logits, params)

    monkeypatch.setattr(Sampler, "forward", watched)
    pair.plain.generate([[1, 2, 3]], greedy_params(2))
    assert pair.plain.model_runner.model.lm_head.weight.shape[0] == 66
    assert widths == [131, 131]


def test_an_exception_between_two_steps_leaves_the_ranks_together(
    pair: Pair, plain: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = pair.plain
    prompt = plain.prompts([6], 5, seed=4)[0]
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "forward", lambda *_: pytest.fail("no token today"))
        with pytest.raises(pytest.fail.Exception):
            llm.generate([prompt], greedy_params(5))
    assert_empty(llm)
    outputs = llm.generate([prompt], greedy_params(5))
    assert tokens_of(outputs) == [plain.greedy(prompt, 5)]


def test_four_ranks_replicate_two_kv_heads_and_end_when_one_is_killed(tmp_path: Path) -> None:
    oracle = Oracle.create(tmp_path, {"vocab_size": 130, "tie_word_embeddings": True})
    chief = Chief()
    with noting_workers() as pids:
        llm = make_llm(oracle.folder, chief, tensor_parallel_size=4, max_num_batched_tokens=9)
    assert len(pids) == 3
    check(llm, oracle, [1, 10, 13], seed=5)

    victim = sorted(pids)[1]
    chief.at_step[llm.engine_step + 3] = partial(os.kill, victim, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"rank \d was killed by SIGKILL"):
        llm.generate([[1, 2, 3], [4]], greedy_params(9))
    assert not any(map(is_running, pids))
    assert_empty(llm)


def test_workers_end_with_the_last_reference_to_their_engine(narrow: Oracle) -> None:
    with noting_workers() as pids:
        llm = make_llm(narrow.folder, tensor_parallel_size=2)
    (pid,) = pids
    assert is_running(pid)
    del llm
    assert not is_running(pid)


# -- steps of any size, ports of any kind, workers that do not read --------------------------------


def test_a_step_of_20000_tokens_passes_and_a_worker_that_is_stopped_is_found(
    plain: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        monkeypatch.setenv("MASTER_PORT", str(busy.getsockname()[1]))
        with noting_workers() as pids:
            llm = LLM(
                plain.folder,
                tensor_parallel_size=2,
                distributed_timeout=6,
                max_num_batched_tokens=80_000,
                num_kvcache_blocks=350,
            )
    (pid,) = pids
    prompts = [random_tokens(500, seed=seed) for seed in range(40)]
    assert sum(map(len, prompts)) == 20_000
    outputs = llm.generate(prompts, greedy_params(1))
    assert [len(output["token_ids"]) for output in outputs] == [1] * 40

    os.kill(pid, signal.SIGSTOP)
    prompts = [random_tokens(500, seed=seed) for seed in range(160)]  # more than a pipe holds
    with pytest.raises(WorkerError, match="rank 1 did not answer within 6 s"):
        llm.generate(prompts, greedy_params(1))
    assert not is_running(pid)
    assert_empty(llm)
    with pytest.raises(WorkerError, match=r"this engine has ended.*rank 1"):
        llm.generate(prompts, greedy_params(1))


# -- workers that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("leave", "rank 1 raised SystemExit: no step 3 for me"),
        ("exit", "rank 1 ended with exit code 7"),
        ("sleep", "rank 1 did not answer within 4 s"),
    ],
)
def test_a_worker_that_fails_ends_the_run_by_name(narrow: Oracle, deed: Deed, message: str) -> None:
    chief = Chief(Plot(rank=1, deed=deed))
    with noting_workers() as pids:
        llm = make_llm(narrow.folder, chief, tensor_parallel_size=2, distributed_timeout=4)
    assert chief.num_asked == 1
    (pid,) = pids
    with pytest.raises(WorkerError, match=message) as caught:
        llm.generate([[1, 2, 3], [4]], greedy_params(9))
    assert llm.engine_step == 3
    assert not is_running(pid)
    notes = getattr(caught.value, "__notes__", [])
    assert any("step_start" in note for note in notes) == ("raised" in message)
    assert_empty(llm)
    llm.exit()


def test_what_a_workers_observer_raises_is_said_and_the_run_goes_on(
    narrow: Oracle, capfd: pytest.CaptureFixture[str]
) -> None:
    params = greedy_params(9)
    silent = make_llm(narrow.folder, tensor_parallel_size=2)
    expected = silent.generate([[1, 2, 3], [4]], params)
    silent.exit()
    chief = Chief(Plot(rank=1, deed="raise"))
    llm = make_llm(narrow.folder, chief, tensor_parallel_size=2)
    assert llm.generate([[1, 2, 3], [4]], params) == expected
    llm.exit()
    assert chief.failures == [
        "for_workers: the observer of rank 1 raised an error, which was printed"
    ]
    assert (
        capfd.readouterr().err.count("Saboteur.step_start() raised this error. The run goes on")
        == 1
    )


@pytest.mark.parametrize("deed", ["raise at the start", "raise when made"])
def test_a_worker_that_fails_at_its_start_ends_the_start_by_name(
    narrow: Oracle, deed: Deed
) -> None:
    before = worker_pids()
    chief = Chief(Plot(1, deed))
    with pytest.raises(WorkerError, match="rank 1 raised LookupError: no good start"):
        make_llm(narrow.folder, chief, tensor_parallel_size=2)
    assert worker_pids() == before


def test_a_broken_checkpoint_is_refused_in_the_same_words_as_by_one_rank(
    plain: Oracle, tmp_path: Path
) -> None:
    before = worker_pids()
    tensors = load_file(plain.folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((plain.folder / "config.json").read_bytes())
    messages = set()
    for num_ranks in (1, 2):
        with pytest.raises(WeightsError) as caught:
            make_llm(tmp_path, tensor_parallel_size=num_ranks)
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert worker_pids() == before


def test_an_observer_for_workers_that_cannot_travel_is_refused(narrow: Oracle) -> None:
    before = worker_pids()
    with pytest.raises(TypeError, match=r"for_workers\(\) must return .* sent to another process"):
        make_llm(narrow.folder, Chief(lambda _rank: Observer()), tensor_parallel_size=2)
    assert worker_pids() == before


def test_rank_0s_own_failure_in_a_step_ends_the_others(
    narrow: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with noting_workers() as pids:
        llm = make_llm(narrow.folder, tensor_parallel_size=2)
    with monkeypatch.context() as patch:
        patch.setattr(llm.model_runner.model, "compute_logits", partial(pytest.fail, "no memory"))
        with pytest.raises(pytest.fail.Exception):
            llm.generate([[1, 2, 3]], greedy_params(3))
    assert not any(map(is_running, pids))
    with pytest.raises(WorkerError, match="rank 0 failed within a step"):
        llm.generate([[1, 2, 3]], greedy_params(3))


# -- scripts: the whole process dies, is interrupted, or is one of torchrun's ----------------------

PRELUDE = r"""
    import json, multiprocessing, sys
    from nanovllm import LLM, Observer, SamplingParams

    OPTIONS = {"kvcache_block_size": 4, "num_kvcache_blocks": 200, "tensor_parallel_size": 2}
    PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]

    def generate(llm, max_tokens):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return [output["token_ids"] for output in llm.generate(PROMPTS, params)]

    def say(*what):
        sys.stdout.write(json.dumps(what) + "\n")  # at once: two ranks may speak
        sys.stdout.flush()
"""
LONG_RUN = """
    import os, time

    IS_TIRED = sys.argv[2] == "sleep"

    class Sleeper(Observer):
        def __init__(self, rank):
            assert rank == 1

        def step_start(self, engine_step):
            if engine_step == 5 and IS_TIRED:
                say(os.getpid())
                time.sleep(1000)

    class Reporter(Observer):
        def for_workers(self):
            return Sleeper

        def step_start(self, engine_step):
            if engine_step == 5 and not IS_TIRED:
                say(*[child.pid for child in multiprocessing.active_children()])

    if __name__ == "__main__":
        llm = LLM(sys.argv[1], Reporter(), **OPTIONS)
        try:
            while True:
                generate(llm, 200)
        except KeyboardInterrupt:
            say("interrupted", generate(llm, 6))
"""
LOCKSTEP = """
    import os
    from pathlib import Path
    from nvtrace.recorder import record

    if __name__ == "__main__":
        params = SamplingParams(temperature=0.7, max_tokens=6, seed=5, logprobs=2)
        for number in (1, 2):
            with record(Path(sys.argv[2]) / f"trace{number}.jsonl") as recorder:
                llm = LLM(sys.argv[1], recorder, **OPTIONS)
                outputs = llm.generate(PROMPTS, params)
            say(os.environ["RANK"], number, [(o["token_ids"], o["logprobs"]) for o in outputs])
            llm.exit()
            llm.exit()
        assert not multiprocessing.active_children()
"""


def write_script(folder: Path, body: str) -> Path:
    """Save a script."""
    file = folder / "script.py"
    file.write_text(textwrap.dedent(PRELUDE) + textwrap.dedent(body), encoding="utf-8")
    return file


@contextmanager
def long_run(oracle: Oracle, folder: Path, mood: str) -> Iterator[tuple[Popen[str], int]]:
    """A script in the middle of its run, and its worker's pid."""
    process = start_script(write_script(folder, LONG_RUN), oracle.folder, mood)
    try:
        assert process.stdout is not None
        (pid,) = json.loads(process.stdout.readline() or "[]")
        yield process, pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the worker as well, if it is still there
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def test_workers_end_with_a_parent_that_is_killed(narrow: Oracle, tmp_path: Path) -> None:
    """Even one that listens to nothing: neither to a pipe nor to another rank."""
    with long_run(narrow, tmp_path, "sleep") as (process, pid):
        assert is_running(pid)
        process.kill()
        assert are_gone([process.pid, pid])


def test_after_ctrl_c_the_next_run_is_right_and_no_process_is_left(
    narrow: Oracle, tmp_path: Path
) -> None:
    with long_run(narrow, tmp_path, "go on") as (process, pid):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it as well
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert err == ""
    word, tokens = json.loads(out.splitlines()[-1])
    assert word == "interrupted"
    alone = make_llm(narrow.folder)
    params = greedy_params(6, ignore_eos=True)
    assert tokens == tokens_of(alone.generate([[5, 6, 7], [8, 9, 10, 11]], params))
    assert are_gone([pid])


def test_torchruns_ranks_run_in_lockstep_and_record_apart(narrow: Oracle, tmp_path: Path) -> None:
    from nvtrace.reader import read_ranks  # noqa: PLC0415 - for this test alone

    launcher = [*("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")]
    script = write_script(tmp_path, LOCKSTEP)
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(narrow.folder), str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    params = SamplingParams(temperature=0.7, max_tokens=6, seed=5)
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    expected = tokens_of(make_llm(narrow.folder).generate(prompts, params))
    said = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert [(rank, number) for rank, number, _ in said] == [
        *(("0", 1), ("0", 2), ("1", 1), ("1", 2))
    ]
    for _, _, outputs in said:
        assert outputs == said[0][2]  # log-probabilities as well, to the last bit
        assert [token_ids for token_ids, _ in outputs] == expected
        for token_ids, logprobs in outputs:
            assert [next(iter(found)) for found in logprobs] == list(map(str, token_ids))
    run_ids = set()
    for number in (1, 2):
        records = list(read_ranks(tmp_path / f"trace{number}.jsonl", warn=pytest.fail))
        (_, first), (_, second) = records[:2]
        assert [first.rank, second.rank] == [0, 1]  # type: ignore[union-attr]
        run_ids.add(first.run_id)  # type: ignore[union-attr]
        told = {
            rank: [type(r).__name__ for other, r in records if other == rank] for rank in (0, 1)
        }
        assert told[0] == told[1]  # each runs the whole engine, and tells all of it
    assert len(run_ids) == 2


EXIT_INTERRUPTED = """
    import os, signal, threading

    if __name__ == "__main__":
        llm = LLM(sys.argv[1], **OPTIONS)
        (worker,) = multiprocessing.active_children()
        say(worker.pid)
        os.kill(worker.pid, signal.SIGSTOP)  # it will not hear that it is over
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            llm.exit()
        except KeyboardInterrupt:
            say("interrupted")
"""


def test_an_interrupt_in_exit_leaves_no_worker_that_hangs(narrow: Oracle, tmp_path: Path) -> None:
    process = start_script(write_script(tmp_path, EXIT_INTERRUPTED), narrow.folder)
    try:
        out, err = process.communicate(timeout=PATIENCE)
        (pid,), (word,) = map(json.loads, out.splitlines())
        assert (process.returncode, word) == (0, "interrupted"), err
        assert not is_running(pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
