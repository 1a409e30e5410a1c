"""One model on two GPUs, over NCCL: the tokens of one GPU, and nobody left behind.

`make gpu-pair` runs it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.errors import WorkerError
from nvtrace import events as ev
from nvtrace import record
from nvtrace.envelope import Footer
from nvtrace.reader import read_ranks
from support.cli import environment
from support.oracle import Oracle
from support.ranks import Chief, are_gone, worker_pids

if TYPE_CHECKING:
    from pathlib import Path

    from nanovllm import Observer

pytestmark = pytest.mark.gpu_pair

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
ENGINE_LEFT_ALONE = """
import sys
from nanovllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], device="cuda", max_model_len=512, max_num_seqs=8, tensor_parallel_size=2)
    output, = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))
    print(len(output["token_ids"]), flush=True)
"""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    changes = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
    return Oracle.create(tmp_path_factory.mktemp("model"), changes | {"head_dim": 32})


def make_llm(oracle: Oracle, observer: Observer | None = None, **options: Any) -> LLM:  # noqa: ANN401 - any option of LLM
    defaults: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "max_model_len": 512,
        "num_kvcache_blocks": 32,
        "max_num_seqs": 8,
        "tensor_parallel_size": 2,
        "distributed_timeout": 8,
    }
    return LLM(str(oracle.folder), observer=observer, **defaults | options)


def check(llm: LLM, oracle: Oracle, lengths: tuple[int, ...] = (1, 17, 64, 200)) -> None:
    prompts = oracle.prompts(lengths, PARAMS.max_tokens)
    expected = [oracle.greedy(prompt, PARAMS.max_tokens) for prompt in prompts]
    assert [output["token_ids"] for output in llm.generate(prompts, PARAMS)] == expected


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("fused_kernels", [True, False], ids=["fused", "plain"])
def test_two_gpus_give_the_tokens_of_one(
    oracle: Oracle, enforce_eager: bool, fused_kernels: bool
) -> None:
    llm = make_llm(oracle, enforce_eager=enforce_eager, fused_kernels=fused_kernels)
    pids = worker_pids()
    check(llm, oracle)
    check(llm, oracle, (200, 3))
    llm.exit()
    assert are_gone(pids)


def test_two_gpus_preempt_chunk_and_mix_as_one(oracle: Oracle) -> None:
    options: dict[str, Any] = {
        "kvcache_block_size": 16,
        "num_kvcache_blocks": 24,
        "max_num_batched_tokens": 48,
    }
    for policy in ("prefill_first", "mixed"):
        llm = make_llm(oracle, policy=policy, **options)
        check(llm, oracle, (100, 90, 30, 7))
        llm.exit()


def test_two_engines_on_two_gpus_do_not_meet(oracle: Oracle) -> None:
    first, second = make_llm(oracle), make_llm(oracle)
    check(first, oracle)
    check(second, oracle)
    first.exit()
    check(second, oracle)
    second.exit()


def test_each_ranks_trace_tells_of_its_own_gpu(oracle: Oracle, tmp_path: Path) -> None:
    with record(tmp_path / "trace.jsonl") as observer:
        llm = make_llm(oracle, observer)
        llm.generate(oracle.prompts((5,), 8), PARAMS)
        pids = worker_pids()
        llm.exit()
    assert are_gone(pids)
    records = list(read_ranks(tmp_path / "trace.jsonl"))
    starts = [r for _, r in records if isinstance(r, ev.TpRuntimeInit)]
    assert [(r.rank, r.device, r.backend) for r in starts] == [
        (0, "cuda:0", "nccl"),
        (1, "cuda:1", "nccl"),
    ]
    assert any(isinstance(r, ev.CudagraphReplay) for rank, r in records if rank == 1)
    ends = [(rank, r.exit) for rank, r in records if isinstance(r, Footer)]
    assert ends == [(0, "ok"), (1, "ok")]


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    ("signal_number", "words"),
    [
        (signal.SIGKILL, "rank 1 was killed by SIGKILL"),
        (signal.SIGSTOP, "rank 1 did not answer within 8 s"),
    ],
    ids=["killed", "stopped"],
)
def test_a_rank_that_is_lost_ends_in_an_error_and_the_next_engine_works(
    oracle: Oracle, enforce_eager: bool, signal_number: int, words: str
) -> None:
    chief = Chief()
    llm = make_llm(oracle, chief, enforce_eager=enforce_eager)
    (pid,) = worker_pids()
    chief.at_step[llm.engine_step + 5] = partial(os.kill, pid, signal_number)
    with pytest.raises(WorkerError, match=words):
        llm.generate(oracle.prompts((5,), PARAMS.max_tokens), PARAMS)
    assert are_gone([pid])
    another = make_llm(oracle, enforce_eager=enforce_eager)
    check(another, oracle)
    another.exit()


def test_an_engine_that_nobody_ends_ends_with_its_program(oracle: Oracle, tmp_path: Path) -> None:
    script = tmp_path / "left_alone.py"
    script.write_text(ENGINE_LEFT_ALONE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(oracle.folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "8"), done.stderr


def test_more_ranks_than_gpus_are_refused(oracle: Oracle) -> None:
    with pytest.raises(ValueError, match="no GPU to compute on"):
        make_llm(oracle, tensor_parallel_size=4, num_kvcache_blocks=32)
