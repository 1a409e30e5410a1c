"""Log-probabilities: transformers' log_softmax over the same tokens is the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.layers.logprobs import sampled_logprobs
from support.models import VOCAB_SIZE, random_tokens
from support.oracle import Oracle, make_llm

if TYPE_CHECKING:
    from nanovllm.outputs import RequestOutput

PROMPTS = [random_tokens(length, seed=length) for length in (3, 9, 1, 14)]
# Greedy, drawn, drawn among few; and one that asks for none.
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, logprobs=3),
    SamplingParams(temperature=1.7, max_tokens=9, seed=4, logprobs=0),
    SamplingParams(temperature=0.6, top_k=5, top_p=0.8, max_tokens=7, seed=5, logprobs=VOCAB_SIZE),
    SamplingParams(max_tokens=8, seed=6),
]


def check(oracle: Oracle, prompt: list[int], params: SamplingParams, output: RequestOutput) -> None:
    """Compare with transformers' distribution at each position."""
    token_ids, number = output["token_ids"], params.logprobs
    with torch.inference_mode():
        logits = oracle.reference(torch.tensor([prompt + token_ids])).logits[0]
    expected = logits.log_softmax(dim=-1)[len(prompt) - 1 : -1]  # (num_completion_tokens, vocab)
    assert output["logprobs"] is not None
    assert number is not None
    for token_id, found, row in zip(token_ids, output["logprobs"], expected, strict=True):
        assert next(iter(found)) == token_id
        top = row.topk(number)
        assert set(found) == {token_id, *top.indices.tolist()}
        own = row[list(found)].tolist()
        assert list(found.values()) == pytest.approx(own, abs=1e-4)
        others = [value for key, value in found.items() if key != token_id]
        assert others == sorted(others, reverse=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 4},
        {"policy": "mixed", "max_num_batched_tokens": 6},
        {"num_kvcache_blocks": 9, "max_num_seqs": 3},
    ],
    ids=["together", "in chunks", "mixed", "preempted"],
)
def test_logprobs_are_the_models_whatever_the_batch(
    oracle: Oracle, options: dict[str, Any]
) -> None:
    outputs = make_llm(oracle.folder, **options).generate(PROMPTS, PARAMS)
    for prompt, params, output in zip(PROMPTS[:3], PARAMS[:3], outputs[:3], strict=True):
        check(oracle, prompt, params, output)
    assert outputs[3]["logprobs"] is None


def test_asking_changes_no_token(oracle: Oracle) -> None:
    def tokens(number: int | None) -> list[int]:
        params = SamplingParams(temperature=1.2, seed=3, max_tokens=12, logprobs=number)
        return make_llm(oracle.folder).generate([PROMPTS[0]], params)[0].token_ids

    assert tokens(None) == tokens(0) == tokens(7)


def test_each_generated_token_has_its_logprobs_however_the_request_ends(oracle: Oracle) -> None:
    llm = make_llm(oracle.folder)
    [whole] = llm.generate([PROMPTS[0]], PARAMS[0])
    stop = SamplingParams(
        temperature=0, max_tokens=6, logprobs=3, stop_token_ids=[whole["token_ids"][2]]
    )
    [stopped] = llm.generate([PROMPTS[0]], stop)
    assert len(stopped["logprobs"] or []) == len(stopped["token_ids"]) <= 3
    seq_id = llm.add_request(PROMPTS[1], PARAMS[0])
    assert llm.requests[seq_id].logprobs == []
    for _ in range(3):
        llm.step()
    aborted = llm.abort(seq_id)
    assert len(aborted["logprobs"] or []) == len(aborted["token_ids"]) == 3
    check(oracle, PROMPTS[1], PARAMS[0], aborted)


def test_more_logprobs_than_there_are_tokens_are_refused(oracle: Oracle) -> None:
    llm = make_llm(oracle.folder)
    with pytest.raises(ValueError, match=f"logprobs={VOCAB_SIZE + 1} .* at most {VOCAB_SIZE}"):
        llm.generate([[5]], SamplingParams(logprobs=VOCAB_SIZE + 1))
    assert llm.is_finished()


def test_rows_that_ask_for_none_are_not_looked_at() -> None:
    class Untouchable:
        """Any use of it is an AttributeError or a TypeError."""

    untouchable: Any = Untouchable()
    assert sampled_logprobs(untouchable, [1, 2], [None, None]) == {}
    logits = torch.tensor([[torch.nan, torch.nan], [0.0, 0.0]])
    found = sampled_logprobs(logits, [1, 0], [None, 1])
    assert [*found] == [1]
    assert found[1][0] == pytest.approx(-0.6931472)


def test_the_sampled_token_comes_first_and_is_told_once() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]] * 2)
    found = sampled_logprobs(logits, [2, 1], [2, 1])
    assert [[*row] for row in found.values()] == [[2, 1], [1]]
