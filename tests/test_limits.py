"""What a request may ask, and how many run: pool, max_model_len, max_num_seqs, through the engine.

P8 is a prompt of eight tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nanovllm.errors import RequestRefusedError
from support.models import random_tokens
from support.oracle import Narrator, Oracle, Watcher, assert_empty, greedy_params, make_llm

if TYPE_CHECKING:
    from nanovllm import LLM

P3, P7, P8, P9 = (list(range(20, 20 + length)) for length in (3, 7, 8, 9))


def run(llm: LLM) -> dict[int | None, list[int]]:
    """Step to the end, which comes within reason; return each request's tokens."""
    tokens: dict[int | None, list[int]] = {}
    for _ in range(1000):
        if llm.is_finished():
            return tokens
        for output in llm.step():
            tokens[output["seq_id"]] = output["token_ids"]
    raise AssertionError("the engine runs without end")


# -- a request that can never fit the pool ---------------------------------------------------------


@pytest.mark.parametrize(("prompt", "max_tokens"), [(P9, 1), (P8, 4)])
def test_never_fits_is_refused_with_its_numbers(
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


def test_never_fits_ends_that_request_only(oracle: Oracle) -> None:
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


def test_never_fits_is_found_before_anything_changes(oracle: Oracle) -> None:
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


def test_all_that_never_fit_are_an_error(oracle: Oracle) -> None:
    llm = make_llm(oracle.folder, num_kvcache_blocks=2)
    with pytest.raises(RequestRefusedError):
        llm.generate([P9, [5] * 30], greedy_params(1))
    assert_empty(llm)
    assert llm.num_requests == 0


def test_whatever_fits_ends_and_whatever_does_not_is_refused(oracle: Oracle) -> None:
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


# -- max_model_len ---------------------------------------------------------------------------------


def test_past_max_model_len_one_rule_for_prompt_and_completion_together(oracle: Oracle) -> None:
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
def test_past_max_model_len_goes_no_position_and_no_table(block_size: int, oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, max_model_len=8, kvcache_block_size=block_size)
    prompts = [random_tokens(length, seed=length) for length in range(1, 8)]
    outputs = llm.generate(prompts, greedy_params(50))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output["token_ids"] == oracle.greedy(prompt, 8 - len(prompt))
        assert output["reason"] == "max_model_len"
    assert watcher.highest_position == 6, "the eighth token is never computed"
    assert watcher.widest_table <= -(-8 // block_size)


def test_past_the_models_own_positions_is_past_max_model_len(oracle: Oracle) -> None:
    with pytest.warns(UserWarning, match="max_model_len=4096 is lowered to 512"):
        llm = make_llm(oracle.folder, max_model_len=4096, num_kvcache_blocks=200)
    assert llm.config.max_model_len == 512
    [output] = llm.generate([[5] * 510], greedy_params(9))
    assert (len(output["token_ids"]), output["reason"]) == (2, "max_model_len")
    with pytest.raises(RequestRefusedError, match="max_model_len=512"):
        llm.generate([[5] * 512], greedy_params(1))


# -- max_num_seqs ----------------------------------------------------------------------------------


def test_max_num_seqs_counts_those_running(oracle: Oracle) -> None:
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
def test_max_num_seqs_is_never_exceeded(max_num_seqs: int, oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, max_num_seqs=max_num_seqs, num_kvcache_blocks=9)
    prompts = [random_tokens(length, seed=length) for length in (3, 8, 1, 5, 2, 9, 4)]
    outputs = llm.generate(prompts, [greedy_params(n) for n in (9, 2, 5, 1, 12, 3, 7)])
    assert [len(output["token_ids"]) for output in outputs] == [9, 2, 5, 1, 12, 3, 7]
    assert watcher.most_running == max_num_seqs
