"""Steps that are launched ahead: a right guess saves time, a wrong one changes nothing.

The fake runner computes every step that it is told to run ahead at once, as a GPU would. All tests
with digests in the KV slots thereby also show that this spoils no page. Here: what is predicted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given

from nanovllm.engine import core
from nanovllm.engine.core import EngineCore
from nanovllm.gpu.run_ahead import predict_next_step
from nanovllm.sampling_params import SamplingParams
from support.fake_runner import Settings, make_engine, runner_of
from support.workload import Run, Workload, workloads

if TYPE_CHECKING:
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.core import Launched
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.gpu.run_ahead import NextStep


def engine_with(*prompts: list[int], max_tokens: int = 30, **settings: Any) -> LLMEngine:  # noqa: ANN401 - as Settings takes them
    engine = make_engine(replace(Settings(), **settings))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for prompt in prompts:
        engine.add_request(prompt, params)
    return engine


@given(workloads(with_aborts=False))
def test_a_step_that_is_predicted_comes_true_if_nobody_comes_or_goes(workload: Workload) -> None:
    requests = [replace(request, arrival=0) for request in workload.requests]
    run = Run(replace(workload, requests=requests)).go()
    assert runner_of(run.engine).num_discarded == 0


def test_a_steady_decode_is_predicted_in_every_step_over_page_borders_too() -> None:
    engine = engine_with([1, 2], [1], kvcache_block_size=4, enable_prefix_caching=False)
    while not engine.is_finished():
        engine.step()
    # 1 prefill, 29 decodes; the first decode follows a prefill, the last token ends both.
    assert runner_of(engine).num_ahead == 28


@pytest.mark.parametrize("kvcache_block_size", [64, 3, 1])
@pytest.mark.parametrize("is_caching", [True, False], ids=["caching", "not caching"])
def test_a_step_that_somebody_ends_in_is_predicted_and_so_is_who_takes_the_pages(
    kvcache_block_size: int, is_caching: bool
) -> None:
    engine = make_engine(
        Settings(kvcache_block_size=kvcache_block_size, enable_prefix_caching=is_caching)
    )
    for max_tokens in (9, 20, 14):
        engine.add_request(
            [1], SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        )
    while not engine.is_finished():
        engine.step()
    # 1 prefill, 19 decodes of 3, 2 and 1; the first decode follows the prefill. It cannot be told
    # which page comes next where the last page of the one that ends is about to be published.
    num_untold = {64: 0, 3: 1, 1: 2}[kvcache_block_size] if is_caching else 0
    assert runner_of(engine).num_ahead == 18 - num_untold
    assert runner_of(engine).num_discarded == 0


def test_a_step_begins_before_the_tokens_are_there_if_they_could_not_change_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who may end takes no page: the result of that row is discarded, the others are used."""
    predicted: list[tuple[bool, bool]] = []

    def listening(
        scheduler: Scheduler, batch: Batch, token_ids: list[int] | None = None
    ) -> NextStep | None:
        next_step = predict_next_step(scheduler, batch, token_ids)
        predicted.append((token_ids is None, next_step is not None))
        return next_step

    monkeypatch.setattr(core, "predict_next_step", listening)
    engine = make_engine(Settings(kvcache_block_size=64, num_kvcache_blocks=40))
    prompts = [[1, 2, number] for number in range(7)] + [[2, 1, number] for number in range(7)]
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=9))
    assert {output["finish_reason"] for output in outputs} == {"stop", "length"}
    assert predicted.count((True, True)) == runner_of(engine).num_ahead > 5
    assert (False, True) not in predicted
    assert runner_of(engine).num_discarded == 0


def test_an_arrival_and_an_abort_make_the_guess_wrong_and_the_answers_stay_right() -> None:
    alone = engine_with([1, 2])
    while not alone.is_finished():
        expected = alone.step()
    engine = engine_with([1, 2], [2, 2, 1])
    for _ in range(4):
        engine.step()
    engine.abort(1)
    for _ in range(3):
        engine.step()
    engine.add_request([2, 1], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    outputs = {}
    while not engine.is_finished():
        outputs.update({output["seq_id"]: output for output in engine.step()})
    assert runner_of(engine).num_discarded == 1  # the arrival; the row of the aborted is not missed
    assert outputs[0]["token_ids"] == expected[0]["token_ids"]


def visit_between_two_steps(engine: LLMEngine) -> None:
    """A step of the first request is launched ahead into a new page; a visitor takes that page."""
    engine.add_request([1, 2, 1], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    engine.step()
    engine.step()  # predicts that the first one takes the free list's head
    engine.add_request([2], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    while not engine.is_finished():  # the visitor comes, writes to that page, and goes
        engine.step()


def test_a_page_that_a_visitor_has_overwritten_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(Settings(kvcache_block_size=4, num_kvcache_blocks=8))
    visit_between_two_steps(engine)
    assert runner_of(engine).num_discarded == 1

    def keep(engine_core: EngineCore, batch: Batch) -> Launched | None:
        ahead = engine_core._ahead
        return ahead if ahead is not None and ahead.is_step_of(batch) else None

    monkeypatch.setattr(EngineCore, "_take_ahead", keep)
    with pytest.raises(AssertionError, match="would attend to a wrong slot"):
        visit_between_two_steps(make_engine(Settings(kvcache_block_size=4, num_kvcache_blocks=8)))


def test_a_page_that_is_still_published_is_not_written_to_on_a_guess() -> None:
    engine = engine_with([1, 2, 1, 2, 1], max_tokens=1, kvcache_block_size=4, num_kvcache_blocks=2)
    engine.step()  # its full page is published and free
    engine.add_request([2], SamplingParams(temperature=0, max_tokens=7, ignore_eos=True))
    while not engine.is_finished():
        engine.step()
        assert set(engine.scheduler.block_manager.cached_blocks.values()) <= {0, 1}
    runner = runner_of(engine)
    # 6 decodes: the first follows a prefill; the one that takes the published page is not guessed.
    assert (runner.num_ahead, runner.num_discarded) == (4, 0)
