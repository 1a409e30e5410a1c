"""Kinds of fault that engines like this one had, each with the small input that shows it.

A kind is one group of tests: the input it was found with, and the kind around it, through the whole
engine. Here are 1 and 3 to 10, scheduling and pages; 2 and 12 are in `test_regressions_edges.py`,
13 and 14 in `test_regressions_checkpoints.py`, 15 in `test_life_cycle.py` (11 and part of 15 are of
GPUs and several processes). P8 is a prompt of eight tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nanovllm import SamplingParams
from nanovllm.errors import RequestRefusedError
from support.models import random_tokens
from support.oracle import (
    Narrator,
    Oracle,
    Watcher,
    assert_empty,
    greedy_params,
    make_llm,
    tokens_of,
)

if TYPE_CHECKING:
    from nanovllm import LLM

P3, P7, P8, P9 = (list(range(20, 20 + length)) for length in (3, 7, 8, 9))


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.create(tmp_path_factory.mktemp("model"))


def run(llm: LLM) -> dict[int | None, list[int]]:
    """Step to the end, which comes within reason; return each request's tokens."""
    tokens: dict[int | None, list[int]] = {}
    for _ in range(1000):
        if llm.is_finished():
            return tokens
        for output in llm.step():
            tokens[output["seq_id"]] = output["token_ids"]
    raise AssertionError("the engine runs without end")


# -- 1: a request that can never fit the pool ------------------------------------------------------


@pytest.mark.parametrize(("prompt", "max_tokens"), [(P9, 1), (P8, 4)])
def test_1_never_fits_is_refused_with_its_numbers(
    prompt: list[int], max_tokens: int, oracle: Oracle
) -> None:
    llm = make_llm(oracle.folder, num_kvcache_blocks=2)
    with pytest.raises(
        RequestRefusedError, match=r"3 blocks of 4 tokens.*has 2.*num_kvcache_blocks"
    ) as e:
        llm.generate([prompt], greedy_params(max_tokens))
    assert (e.value.reason, e.value.need, e.value.have) == ("never_fits", 3, 2)
    assert isinstance(e.value, ValueError)
    assert_empty(llm)


def test_1_never_fits_ends_that_request_only(oracle: Oracle) -> None:
    llm = make_llm(oracle.folder, num_kvcache_blocks=2)
    fits, refused = llm.generate([P3, P9], greedy_params(5))
    assert fits["token_ids"] == oracle.greedy(P3, 5)
    assert (fits["finish_reason"], fits["error"]) == ("length", None)
    assert refused["error"] is not None
    assert "num_kvcache_blocks" in refused["error"]
    assert {**refused, "error": ""} == {
        "seq_id": None,
        "text": "",
        "token_ids": [],
        "logprobs": None,
        "finish_reason": "refused",
        "reason": "never_fits",
        "num_prompt_tokens": 9,
        "error": "",
    }
    assert [o["finish_reason"] for o in llm.generate([P9, P3], greedy_params(1))] == [
        *("refused", "length")
    ]
    assert_empty(llm)


def test_1_never_fits_is_found_before_anything_changes(oracle: Oracle) -> None:
    narrator = Narrator()
    llm = make_llm(oracle.folder, narrator, num_kvcache_blocks=2)
    running = llm.add_request(P3, greedy_params(5))
    llm.step()
    narrator.moments.clear()
    table = list(llm.requests[running].block_table)

    with pytest.raises(RequestRefusedError):
        llm.add_request(P9, greedy_params(1))

    assert narrator.moments == ["request_refused"]
    assert list(llm.requests) == [running]
    assert llm.requests[running].block_table == table
    assert llm.num_requests == 1
    assert run(llm) == {running: oracle.greedy(P3, 5)}


def test_1_all_that_never_fit_are_an_error(oracle: Oracle) -> None:
    llm = make_llm(oracle.folder, num_kvcache_blocks=2)
    with pytest.raises(RequestRefusedError):
        llm.generate([P9, [5] * 30], greedy_params(1))
    assert_empty(llm)
    assert llm.num_requests == 0


def test_1_whatever_fits_ends_and_whatever_does_not_is_refused(oracle: Oracle) -> None:
    llm = make_llm(oracle.folder, Watcher(), num_kvcache_blocks=2)
    for length in range(1, 12):
        for max_tokens in range(1, 11):
            # Of the last token there is no K and V: it is sampled, and never computed.
            if length + max_tokens - 1 > 8:
                with pytest.raises(RequestRefusedError):
                    llm.add_request([20] * length, greedy_params(max_tokens))
            else:
                seq_id = llm.add_request([20] * length, greedy_params(max_tokens))
                assert len(run(llm)[seq_id]) == max_tokens
    assert_empty(llm)


# -- 3: running past max_model_len -----------------------------------------------------------------


def test_3_past_max_model_len_one_rule_for_prompt_and_completion_together(oracle: Oracle) -> None:
    llm = make_llm(oracle.folder, max_model_len=8)
    for prompt in (P8, P9):
        with pytest.raises(
            RequestRefusedError, match=f"{len(prompt)} tokens.*max_model_len=8"
        ) as e:
            llm.add_request(prompt, greedy_params(2))
        assert (e.value.reason, e.value.have) == ("prompt_too_long", 8)
    short, cut, refused = llm.generate([P7, P7, P8], [greedy_params(n) for n in (1, 2, 3)])
    assert short["token_ids"] == cut["token_ids"] == oracle.greedy(P7, 1)
    assert (short["finish_reason"], short["reason"]) == ("length", "max_tokens")
    assert (cut["finish_reason"], cut["reason"]) == ("length", "max_model_len")
    assert (refused["finish_reason"], refused["reason"]) == ("refused", "prompt_too_long")


@pytest.mark.parametrize("block_size", [1, 3, 4, 8, 256])
def test_3_past_max_model_len_goes_no_position_and_no_table(
    block_size: int, oracle: Oracle
) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, max_model_len=8, kvcache_block_size=block_size)
    prompts = [random_tokens(length, seed=length) for length in range(1, 8)]
    outputs = llm.generate(prompts, greedy_params(50))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output["token_ids"] == oracle.greedy(prompt, 8 - len(prompt))
        assert output["reason"] == "max_model_len"
    assert watcher.highest_position == 6, "the eighth token is never computed"
    assert watcher.widest_table <= -(-8 // block_size)


def test_3_past_the_models_own_positions_is_past_max_model_len(oracle: Oracle) -> None:
    with pytest.warns(UserWarning, match="max_model_len=4096 is lowered to 512"):
        llm = make_llm(oracle.folder, max_model_len=4096, num_kvcache_blocks=200)
    assert llm.config.max_model_len == 512
    [output] = llm.generate([[5] * 510], greedy_params(9))
    assert (len(output["token_ids"]), output["reason"]) == (2, "max_model_len")
    with pytest.raises(RequestRefusedError, match="max_model_len=512"):
        llm.generate([[5] * 512], greedy_params(1))


# -- 4: max_num_seqs ignores those running ---------------------------------------------------------


def test_4_max_num_seqs_counts_those_running(oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, max_num_seqs=2)
    first = [llm.add_request(prompt, greedy_params(6)) for prompt in (P3, P8)]
    llm.step()
    llm.step()
    third = llm.add_request([90, 91, 92, 93, 94, 95, 96], greedy_params(6))
    waiting = llm.requests[third]
    free = llm.scheduler.block_manager.num_free_blocks
    while all(seq_id in llm.requests for seq_id in first):
        assert not waiting.block_table
        assert [seq.seq_id for seq in llm.scheduler.waiting] == [third]
        llm.step()
    assert llm.scheduler.block_manager.num_free_blocks > free
    assert run(llm)[third] == oracle.greedy([90, 91, 92, 93, 94, 95, 96], 6)
    assert watcher.most_running == 2
    assert watcher.prefills == [[(0, 3), (1, 8)], [(2, 7)]]


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_4_max_num_seqs_is_never_exceeded(max_num_seqs: int, oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, max_num_seqs=max_num_seqs, num_kvcache_blocks=9)
    prompts = [random_tokens(length, seed=length) for length in (3, 8, 1, 5, 2, 9, 4)]
    outputs = llm.generate(prompts, [greedy_params(n) for n in (9, 2, 5, 1, 12, 3, 7)])
    assert [len(output["token_ids"]) for output in outputs] == [9, 2, 5, 1, 12, 3, 7]
    assert watcher.most_running == max_num_seqs


# -- 5: a fully cached, block-aligned prompt -------------------------------------------------------


def test_5_fully_cached_prompt_computes_at_least_one_token(oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher)
    p12 = [*P8, 60, 61, 62, 63]
    for prompt in (P8, P8, p12):
        assert tokens_of(llm.generate([prompt], greedy_params(5))) == [oracle.greedy(prompt, 5)]
    assert [watcher.num_cached_tokens[seq_id] for seq_id in range(3)] == [[0], [4], [8]]
    assert watcher.prefills == [[(0, 8)], [(1, 4)], [(2, 4)]]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8])
def test_5_fully_cached_prompts_of_any_length_give_the_same_output(
    block_size: int, oracle: Oracle
) -> None:
    for length in range(1, 17):
        watcher = Watcher()
        llm = make_llm(oracle.folder, watcher, kvcache_block_size=block_size)
        prompt = random_tokens(length, seed=length)
        for _ in range(3):
            assert tokens_of(llm.generate([prompt], greedy_params(2))) == [oracle.greedy(prompt, 2)]
        whole = (length - 1) // block_size * block_size
        assert watcher.num_cached_tokens == {0: [0], 1: [whole], 2: [whole]}


# -- 6: preempted, then re-admitted with a prefix hit ----------------------------------------------


@pytest.mark.parametrize("budget", [2, 3, 10000])
def test_6_readmitted_with_a_prefix_hit_goes_not_past_its_end(budget: int, oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(
        oracle.folder,
        watcher,
        kvcache_block_size=2,
        num_kvcache_blocks=6,
        max_num_batched_tokens=budget,
    )
    prompts = [[1, 2, 3, 4], [1, 2, 3, 4, 5]]
    outputs = llm.generate(prompts, [greedy_params(6), greedy_params(5)])
    assert tokens_of(outputs) == [oracle.greedy(prompts[0], 6), oracle.greedy(prompts[1], 5)]
    readmitted = [cached for cached in watcher.num_cached_tokens.values() if len(cached) > 1]
    assert readmitted
    assert all(cached[1] >= 2 for cached in readmitted)
    assert watcher.highest_position == 8
    assert_empty(llm)


def test_6_a_budget_of_one_token_runs_one_request_at_a_time(oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(
        oracle.folder, watcher, kvcache_block_size=2, num_kvcache_blocks=6, max_num_batched_tokens=1
    )
    prompts = [[1, 2, 3, 4], [1, 2, 3, 4, 5]]
    outputs = llm.generate(prompts, [greedy_params(6), greedy_params(5)])
    assert tokens_of(outputs) == [oracle.greedy(prompts[0], 6), oracle.greedy(prompts[1], 5)]
    assert watcher.highest_position == 8
    assert_empty(llm)


# -- 7: reviving a free cached block ---------------------------------------------------------------


def test_7_revived_block_depends_on_all_before_it(oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, kvcache_block_size=2)
    prompts = [[1, 2, 3, 4], [1, 2, 5, 6, 7], [5, 6, 8]]
    for prompt in prompts:
        assert tokens_of(llm.generate([prompt], greedy_params(1))) == [oracle.greedy(prompt, 1)]
    assert [watcher.num_cached_tokens[seq_id] for seq_id in range(3)] == [[0], [2], [0]]


def test_7_revived_block_is_not_taken_again_for_the_rest_of_the_prompt(oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, kvcache_block_size=2, num_kvcache_blocks=4)
    for prompt in ([1, 2, 3, 4, 5, 6], [7] * 3, [1, 2, 9, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 7]):
        assert tokens_of(llm.generate([prompt], greedy_params(2))) == [oracle.greedy(prompt, 2)]
        assert_empty(llm)
    assert watcher.num_cached_tokens[2] == [2]


# -- 8: a prefix shared within one step ------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(1, 5), (5, 1), (1, 1), (5, 5)])
def test_8_equal_prompts_in_one_step_share_nothing_uncomputed(
    lengths: tuple[int, int], oracle: Oracle
) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, num_kvcache_blocks=9)
    outputs = llm.generate([P8, P8], [greedy_params(n) for n in lengths])
    assert tokens_of(outputs) == [oracle.greedy(P8, n) for n in lengths]
    assert watcher.prefills == [[(0, 8), (1, 8)]]
    assert dict(watcher.num_cached_tokens) == {0: [0], 1: [0]}
    # Whichever of the two left first, the prefix is still there.
    llm.generate([[*P8, 99]], greedy_params(1))
    assert watcher.num_cached_tokens[2] == [8]


def test_8_equal_prompts_of_which_one_is_freed_leave_the_others_entry(oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, num_kvcache_blocks=9)
    llm.add_request(P8, greedy_params(1))
    llm.add_request(P8, greedy_params(6))
    llm.step()  # the first has left; it was its pages that were published
    for prompt in ([70] * 9, [*P8, 40], [80] * 5):
        seq_id = llm.add_request(prompt, greedy_params(3))
        while seq_id in llm.requests:
            for output in llm.step():
                if output["seq_id"] == seq_id:
                    assert output["token_ids"] == oracle.greedy(prompt, 3)
    assert watcher.num_cached_tokens[3] == [8]


def test_8_an_aborted_prompt_leaves_no_page_that_was_not_computed(oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, max_num_batched_tokens=5)
    [prompt] = oracle.prompts([19], 5, seed=8)
    for num_steps in (1, 2):
        seq_id = llm.add_request(prompt, greedy_params(5))
        for _ in range(num_steps):
            llm.step()
        llm.abort(seq_id)  # after 5 tokens; then after 4 found and 10 computed
    assert tokens_of(llm.generate([prompt], greedy_params(5))) == [oracle.greedy(prompt, 5)]
    assert dict(watcher.num_cached_tokens) == {0: [0], 1: [4], 2: [12]}


# -- 9: preemption changes the output --------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_9_preempted_twice_gives_what_a_huge_pool_gives(temperature: float, oracle: Oracle) -> None:
    prompts = oracle.prompts([3, 5, 4], 30, seed=9)
    params = [SamplingParams(temperature, max_tokens=30, seed=seed) for seed in range(3)]
    huge = make_llm(oracle.folder, num_kvcache_blocks=1000).generate(prompts, params)
    for num_blocks in (9, 10, 13):
        watcher = Watcher()
        llm = make_llm(oracle.folder, watcher, num_kvcache_blocks=num_blocks)
        assert llm.generate(prompts, params) == huge
        assert max(watcher.num_preemptions.values()) >= 2
        assert watcher.num_sampled == {0: 30, 1: 30, 2: 30}


# -- 10: chunk boundaries change the output --------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 7, 10000])
@pytest.mark.parametrize("block_size", [4, 6])
def test_10_chunks_give_the_same_tokens_and_sample_at_their_end_only(
    block_size: int, budget: int, oracle: Oracle
) -> None:
    watcher = Watcher()
    llm = make_llm(
        oracle.folder, watcher, kvcache_block_size=block_size, max_num_batched_tokens=budget
    )
    prompts = [P3, P9, P8, random_tokens(21, seed=1), [50]]
    outputs = llm.generate(prompts, greedy_params(6))
    assert tokens_of(outputs) == [oracle.greedy(prompt, 6) for prompt in prompts]
    assert all(sum(num_tokens for _, num_tokens in step) <= budget for step in watcher.prefills)
    assert watcher.num_sampled == dict.fromkeys(range(5), 6)
    if budget == 1:
        assert all(len(step) == 1 for step in watcher.prefills)
    if budget == 10000:
        assert len(watcher.prefills) == 1
