"""The engine's graphs with everything but their kernels: rows that leave, join, end unexpectedly.

`GraphRunner` computes what is in the graphs' buffers, as a GPU does, and looks at every slot that a
running sequence may read.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from nanovllm.gpu.cuda_graphs import DecodeGraphs, GraphStep
from nanovllm.sampling_params import SamplingParams
from support.fake_runner import Settings
from support.fuzz import draw_case
from support.graph_runner import make_graph_engine
from support.workload import Request, Run, Workload, workloads

if TYPE_CHECKING:
    from nanovllm.engine.batch import Batch

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def run(workload: Workload) -> Run:
    done = Run(workload, make=make_graph_engine).go()
    for index, seq_id in done.seq_ids.items():
        request, seq = workload.requests[index], done.sequences[seq_id]
        if seq.finish_reason != "aborted":
            answer = request.answer(workload.settings.max_model_len)
            assert (seq.completion_token_ids, seq.finish_reason) == answer
    return done


def crowd(seed: int) -> Workload:
    """Many rows of one graph size, of which some end by a token, in pages of several sizes."""
    rng = Random(seed)
    max_model_len = rng.choice([48, 64, 100])
    requests = [
        Request(
            prompt=[rng.randrange(3) for _ in range(rng.randint(1, 7))],
            max_tokens=rng.randint(10, max_model_len - 8),
            ignore_eos=rng.random() < 0.6,
            abort=rng.randint(1, 30) if rng.random() < 0.2 else None,
        )
        for _ in range(rng.choice([9, 12, 16, 20, 30]))
    ]
    settings = Settings(
        kvcache_block_size=rng.choice([4, 8, 12, 16, 24]),
        num_kvcache_blocks=800,
        max_num_seqs=rng.choice([16, 32]),
        max_model_len=max_model_len,
        enable_prefix_caching=rng.random() < 0.8,
    )
    return Workload(settings, requests)


@given(workloads())
def test_the_answers_of_any_workload_are_right_through_the_graphs(workload: Workload) -> None:
    run(workload)


@pytest.mark.parametrize("seed", range(40))
def test_the_answers_of_a_crowd_are_right_through_the_graphs(seed: int) -> None:
    run(crowd(seed))


@pytest.mark.parametrize("index", range(12))
def test_the_answers_of_longer_workloads_are_right_through_the_graphs(index: int) -> None:
    run(draw_case(11, index).workload)


def decode_on_after_an_abort() -> None:
    engine = make_graph_engine(
        Settings(kvcache_block_size=8, num_kvcache_blocks=64, max_num_seqs=4, max_model_len=64)
    )
    for number in range(4):
        engine.add_request([1, 2, number], LONG)
    for _ in range(3):
        engine.step()
    engine.abort(3)  # three rows stay on the graph of four
    while not engine.is_finished():
        engine.step()


def test_a_row_that_has_ended_unexpectedly_is_padding_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it goes on, and past its last page it writes to pages of others."""
    decode_on_after_an_abort()
    monkeypatch.setattr(DecodeGraphs, "clear", lambda _graphs, _places: None)
    with pytest.raises(AssertionError, match="would attend to a wrong slot"):
        decode_on_after_an_abort()


def test_decodes_are_launched_ahead_also_where_sequences_end_by_a_token() -> None:
    settings = Settings(kvcache_block_size=64, max_num_seqs=16, max_model_len=64)
    requests = [Request([1, 2, number], 30, ignore_eos=number % 2 == 0) for number in range(7)]
    ahead: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        is_step_of = GraphStep.is_step_of

        def listening(step: GraphStep, batch: Batch) -> bool:
            ahead.append(is_step_of(step, batch))
            return ahead[-1]

        patch.setattr(GraphStep, "is_step_of", listening)
        run(Workload(settings, requests))
    assert ahead.count(True) > 3 * ahead.count(False)
