"""One model on two GPUs, over NCCL: the tokens of one GPU, and nobody left behind.

`make gpu-pair` runs it. In this version such an engine is refused: these tests say what is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nanovllm import LLM, SamplingParams
from nvtrace import events as ev
from nvtrace import record
from nvtrace.reader import read_ranks
from support.oracle import Oracle
from support.ranks import are_gone, worker_pids

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu_pair

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    changes = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
    return Oracle.create(tmp_path_factory.mktemp("model"), changes | {"head_dim": 32})


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_two_gpus_give_the_tokens_of_one(oracle: Oracle, enforce_eager: bool) -> None:
    prompts = oracle.prompts((1, 17, 64, 200), PARAMS.max_tokens)
    expected = [oracle.greedy(prompt, PARAMS.max_tokens) for prompt in prompts]
    llm = LLM(
        str(oracle.folder),
        device="cuda",
        dtype="float32",
        max_model_len=512,
        num_kvcache_blocks=32,
        max_num_seqs=8,
        tensor_parallel_size=2,
        enforce_eager=enforce_eager,
    )
    assert [output["token_ids"] for output in llm.generate(prompts, PARAMS)] == expected
    llm.exit()


def test_each_ranks_trace_tells_of_its_own_gpu(oracle: Oracle, tmp_path: Path) -> None:
    with record(tmp_path / "trace.jsonl") as observer:
        llm = LLM(
            str(oracle.folder),
            observer=observer,
            device="cuda",
            max_model_len=512,
            max_num_seqs=8,
            tensor_parallel_size=2,
        )
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
