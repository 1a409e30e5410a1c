"""CUDA graphs, as far as they can be tried without a GPU: sizes, and what must come true ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from nanovllm.config import Config
from nanovllm.engine.batch import Batch
from nanovllm.engine.kv_cache import estimate_budget
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import KVCacheError
from nanovllm.gpu.cuda_graphs import (
    DecodeBuffers,
    graph_batch_sizes,
    is_sampled_in_graph,
    smallest_that_holds,
)
from nanovllm.gpu.run_ahead import NextStep
from nanovllm.gpu.timer import gpu_timer
from nanovllm.gpu.warmup import StepMemory, largest_prefill
from nanovllm.parallel.ranks import Ranks
from nanovllm.parallel.tensor_parallel import ALONE
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.devices import GIB
from support.fake_runner import FAKE_MODEL

if TYPE_CHECKING:
    from nanovllm.utils.model_config import ModelConfig


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (40, [1, 2, 4, 8, 16, 32, 40]),
        (64, [1, 2, 4, 8, 16, 32, 48, 64]),
    ],
)
def test_graphs_cover_every_batch_up_to_the_limit(max_num_seqs: int, sizes: list[int]) -> None:
    assert graph_batch_sizes(max_num_seqs) == sizes
    for batch_size in range(1, max_num_seqs + 1):
        size = smallest_that_holds(batch_size, sizes)
        assert size == min(size for size in sizes if size >= batch_size)
    assert smallest_that_holds(max_num_seqs + 1, sizes) is None


def test_sizes_are_further_apart_from_512_on_and_end_at_2048() -> None:
    assert graph_batch_sizes(600)[-4:] == [496, 512, 576, 600]
    assert graph_batch_sizes(512) == graph_batch_sizes(600)[:-2]
    assert graph_batch_sizes(10_000)[-2:] == [1984, 2048]


def running(seq_id: int, num_computed_tokens: int, pages: list[int]) -> Sequence:
    seq = Sequence(seq_id, [1] * (num_computed_tokens + 1), SamplingParams())
    seq.num_computed_tokens = num_computed_tokens
    seq.block_table = pages
    return seq


def rows_of(next_step: NextStep, *seqs: Sequence) -> list[int] | None:
    return next_step.rows_of(Batch(0, seqs=[*seqs]))


def test_a_step_ahead_comes_true_with_the_same_sequences_positions_and_pages_only() -> None:
    first, second = running(0, 4, [3, 7]), running(1, 2, [5])
    ahead = NextStep([1], [0, 2], [(0, 7)], [first, second], [4, 2])
    assert rows_of(ahead, first, second) == [0, 1]
    assert rows_of(ahead, second, first) is None
    assert rows_of(ahead, first, second, running(2, 2, [6])) is None
    assert ahead.rows_of(Batch(0, seqs=[first, second], num_prefills=1)) is None
    second.num_computed_tokens = 3
    assert rows_of(ahead, first, second) is None
    second.num_computed_tokens = 2
    first.block_table = [3, 8]
    assert rows_of(ahead, first, second) is None


def test_rows_of_a_step_ahead_count_without_those_that_have_ended_and_only_those() -> None:
    seqs = [running(seq_id, 4, [seq_id]) for seq_id in range(4)]
    ahead = NextStep([], [0, 1, 2, 3], [], seqs, [4] * 4)
    assert rows_of(ahead, seqs[0], seqs[2]) is None  # the others may be preempted
    seqs[1].finish_reason, seqs[3].finish_reason = "eos", "aborted"
    assert rows_of(ahead, seqs[0], seqs[2]) == [0, 2]
    assert rows_of(ahead, seqs[2]) is None
    assert rows_of(ahead) is None


@pytest.mark.parametrize(
    ("params", "is_in_graph"),
    [
        (SamplingParams(temperature=0), True),
        (SamplingParams(temperature=0.7), True),
        (SamplingParams(temperature=0, top_k=5), True),  # greedy: nothing to cut
        (SamplingParams(temperature=0.7, top_k=5), False),
        (SamplingParams(temperature=0.7, top_p=0.9), False),
        (SamplingParams(temperature=0, logprobs=0), False),
    ],
)
def test_a_graph_draws_what_needs_no_look_at_the_logits(
    params: SamplingParams, is_in_graph: bool
) -> None:
    assert is_sampled_in_graph(Sequence(0, [1], params)) == is_in_graph


def test_no_temperature_but_0_is_greedy_in_a_graph() -> None:
    buffers = DecodeBuffers(4, 1, 8, torch.float32, torch.device("cpu"))
    temperatures = (0.0, 1e-60, 1e-300, 1.0)
    params = [SamplingParams(temperature=temperature) for temperature in temperatures]
    buffers.load_sampling([Sequence(row, [1], some) for row, some in enumerate(params)])
    assert (buffers.temperatures == 0).tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (4, 4096)),
        ({"max_num_seqs": 2}, (2, 4096)),
        ({"max_num_batched_tokens": 100}, (1, 100)),
        ({"max_model_len": 512, "max_num_batched_tokens": 1300}, (3, 433)),  # and one is left over
        ({"max_model_len": 9000}, (2, 8192)),
    ],
)
def test_the_made_up_prefill_fills_a_step(options: dict[str, int], shape: tuple[int, int]) -> None:
    assert largest_prefill(Config.create("model", options)) == shape


def budget_of(config: Config, model: ModelConfig, step: StepMemory) -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as patch:
        memory = (100 * GIB, 90 * GIB)
        patch.setattr("nanovllm.engine.kv_cache.device_memory", lambda _device: memory)
        budget = estimate_budget(config, model, Ranks(ALONE), step)
    assert budget.rule == "gpu_measured"
    assert budget.limit_bytes is None
    return budget.available_bytes, budget.num_blocks


def test_a_gpus_pages_fill_what_a_step_leaves() -> None:
    config = Config.create("model", {"gpu_memory_utilization": 0.9, "dtype": "bfloat16"})
    step = StepMemory(peak_bytes=7 * GIB, current_bytes=2 * GIB, graph_pool_bytes=GIB)
    model = replace(FAKE_MODEL, num_key_value_heads=8, head_dim=128, num_hidden_layers=28)
    available, num_blocks = budget_of(config, model, step)
    assert available == (90 - 10 - (7 - 2) - 1) * GIB
    block_bytes = 2 * 28 * 256 * 8 * 128 * 2
    assert num_blocks == available // block_bytes


def test_where_a_step_leaves_nothing_the_numbers_are_named() -> None:
    config = Config.create("model", {"gpu_memory_utilization": 0.2, "dtype": "bfloat16"})
    step = StepMemory(peak_bytes=12 * GIB, current_bytes=2 * GIB, graph_pool_bytes=GIB)
    with pytest.raises(KVCacheError, match=r"11\.00 GiB for a step's own tensors") as caught:
        budget_of(config, FAKE_MODEL, step)
    assert "max_num_batched_tokens" in str(caught.value)


def test_a_cpu_has_no_queue_to_measure() -> None:
    with gpu_timer(torch.device("cpu")) as timer:
        pass
    assert timer is None
