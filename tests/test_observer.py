"""What an observer of the engine hears, in which order, and that hearing it changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nanovllm import Observer, SamplingParams
from nvtrace.recorder import record
from support.oracle import Narrator, Oracle, Watcher, greedy_params, make_llm

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Oracle.create(tmp_path_factory.mktemp("model")).folder


START_UP = """
engine_init tp_runtime_init model_weights_loaded kv_budget_estimate cudagraph_skip engine_ready
"""
A_RUN = """
generate_start request_enqueue request_enqueue
step_start blocks_allocate state_transition blocks_allocate state_transition
schedule_prefill prepare_prefill_tensors run_eager sample_tokens blocks_hash
blocks_release state_transition step_end request_output
step_start schedule_decode prepare_decode_tensors run_eager sample_tokens blocks_hash step_end
step_start blocks_append schedule_decode prepare_decode_tensors run_eager sample_tokens
blocks_release state_transition step_end request_output
generate_finish
"""
CHUNKS = """
generate_start request_enqueue request_enqueue
step_start blocks_allocate state_transition admission_stop schedule_prefill
prepare_prefill_tensors run_eager blocks_hash step_end
step_start blocks_share blocks_allocate state_transition schedule_prefill
prepare_prefill_tensors run_eager sample_tokens blocks_release state_transition
blocks_release state_transition step_end request_output request_output
generate_finish
"""
NOT_IN_THEM = """
warmup_model cudagraph_capture request_refused request_abort engine_error engine_reset
schedule_mixed preempt blocks_revive blocks_evict cudagraph_replay gpu_time
"""
KNOWN = {*f"{START_UP} {A_RUN} {CHUNKS} {NOT_IN_THEM}".split()}


def heard_by(narrator: Narrator) -> list[str]:
    """The moments since the last call. A moment that these lists do not know may come anywhere."""
    heard = [moment for moment in narrator.moments if moment in KNOWN]
    narrator.moments.clear()
    return heard


def test_an_observer_hears_each_moment_in_its_order(folder: Path) -> None:
    narrator = Narrator()
    llm = make_llm(folder, narrator)
    assert heard_by(narrator) == START_UP.split()

    llm.generate([[5, 6, 7], [8, 9, 10, 11]], [greedy_params(3), greedy_params(1)])

    assert heard_by(narrator) == A_RUN.split()


def test_an_observer_hears_chunks_shared_pages_preemptions_refusals_and_aborts(
    folder: Path,
) -> None:
    narrator = Narrator()
    llm = make_llm(folder, narrator, max_num_batched_tokens=4, num_kvcache_blocks=4)
    narrator.moments.clear()
    llm.generate([[5, 6, 7, 8, 9], [5, 6, 7, 8, 9]], [greedy_params(1), greedy_params(1)])
    assert heard_by(narrator) == CHUNKS.split()

    llm.generate([[5, 6, 7, 8], [50] * 4, [60] * 99], greedy_params(8))
    heard = heard_by(narrator)
    assert {"preempt", "request_refused", "blocks_evict", "admission_stop"} <= {*heard}
    at = heard.index("preempt")
    assert heard[at - 1 : at + 2] == ["blocks_release", "preempt", "state_transition"]

    llm.abort(llm.add_request([5], greedy_params(2)))
    assert heard_by(narrator) == [
        *("request_enqueue", "request_abort", "state_transition", "request_output")
    ]


def test_an_observer_changes_nothing(folder: Path, tmp_path: Path) -> None:
    options = {"max_num_batched_tokens": 5, "num_kvcache_blocks": 9}
    prompts = [*PROMPTS, [77] * 99, PROMPTS[2]]
    params = [
        greedy_params(12),
        *(SamplingParams(temperature=0.8, top_k=50, top_p=0.9, max_tokens=12),) * 3,
        SamplingParams(max_tokens=7, seed=1),
    ]
    silent = make_llm(folder, None, **options).generate(prompts, params)
    observers: list[Observer] = [Observer(), Narrator(), Watcher()]
    for observer in observers:
        assert make_llm(folder, observer, **options).generate(prompts, params) == silent
    with record(tmp_path / "trace.jsonl") as recorder:
        assert make_llm(folder, recorder, **options).generate(prompts, params) == silent
    assert silent[3]["finish_reason"] == "refused"
