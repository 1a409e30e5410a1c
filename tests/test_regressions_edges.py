"""Kinds of fault at the engine's edges: 2, bad input, and 12, the sampler's contract.

Goes on with `test_regressions.py`. What the sampler does by itself is tested elsewhere; here it is
what a user of `LLM` sees.
"""

from __future__ import annotations

import math
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from support.models import VOCAB_SIZE
from support.oracle import (
    Narrator,
    Oracle,
    assert_empty,
    greedy_params,
    make_llm,
    save_tokenizer,
    tokens_of,
)

if TYPE_CHECKING:
    from pathlib import Path


GOOD = [5, 6, 7]


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    oracle = Oracle.create(tmp_path_factory.mktemp("model"))
    save_tokenizer(oracle.folder)
    return oracle


@pytest.fixture
def copy(oracle: Oracle, tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return shutil.copytree(oracle.folder, tmp_path / "copy")


# -- 2: bad limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_2_bad_max_tokens_are_a_value_error(max_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens.*{max_tokens}"):
        SamplingParams(max_tokens=max_tokens)


def test_2_bad_max_tokens_of_a_half_token_are_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"max_tokens.*1\.5"):
        SamplingParams(max_tokens=1.5)  # type: ignore[arg-type]


BAD_PROMPTS: list[tuple[object, type[Exception], str]] = [
    ([], ValueError, "at least one token"),
    ("", ValueError, "at least one token"),
    ([VOCAB_SIZE], ValueError, rf"token id {VOCAB_SIZE} .*\[0, {VOCAB_SIZE}\)"),
    ([5, -1], ValueError, "token id -1"),
    ([10**30], ValueError, f"token id {10**30}"),
    ([5, 6.0], TypeError, r"not 6\.0"),
    ([True], TypeError, "not True"),
    ([None], TypeError, "not None"),
    (["w5"], TypeError, "not 'w5'"),
    ([[5, 6]], TypeError, r"not \[5, 6\]"),
    (None, TypeError, "not None"),
    (5, TypeError, "not 5"),
    (b"w5", TypeError, "not b'w5'"),
    ({5: 6}, TypeError, "str or a list"),
]


@pytest.mark.parametrize(("prompt", "error", "message"), BAD_PROMPTS)
def test_2_bad_prompts_are_refused_with_nothing_queued(
    prompt: list[int], error: type[Exception], message: str, oracle: Oracle
) -> None:
    narrator = Narrator()
    llm = make_llm(oracle.folder, narrator)
    narrator.moments.clear()
    for prompts in ([prompt], [GOOD, prompt], [prompt, GOOD]):
        with pytest.raises(error, match=message):
            llm.generate(prompts, greedy_params(3))
    with pytest.raises(error, match=message):
        llm.add_request(prompt, greedy_params(3))
    assert_empty(llm)
    assert (llm.num_requests, narrator.moments) == (0, [])
    assert tokens_of(llm.generate([GOOD], greedy_params(3))) == [oracle.greedy(GOOD, 3)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([GOOD] * 3, [greedy_params(1)] * 2), ValueError, "3 prompts, but 2 sampling_params"),
        (([GOOD], [greedy_params(1)] * 2), ValueError, "1 prompts, but 2 sampling_params"),
        (([GOOD], []), ValueError, "1 prompts, but 0 sampling_params"),
        ((b"w5 w6",), TypeError, "list of prompts, not bytes"),
        ((GOOD,), TypeError, "a prompt must be a str or a list of token ids, .*, not 5"),
        (([{"prompt": 5}],), TypeError, "a prompt must be a str .*, not {'prompt': 5}"),
        (([{"prompt": "w5", "multi_modal_data": {}}],), TypeError, "dict with one .*_modal_data"),
        (({},), TypeError, "a prompt must be .*, not {}"),
        ((None,), TypeError, "list of prompts, not NoneType"),
        (([GOOD], {"max_tokens": 3}), TypeError, "SamplingParams, not {"),
        (([GOOD], 3), TypeError, "SamplingParams, not 3"),
        (([GOOD], [3]), TypeError, "SamplingParams, not 3"),
        (([GOOD] * 2, [greedy_params(1), "x"]), TypeError, "SamplingParams, not 'x'"),
    ],
)
def test_2_bad_arguments_of_generate_are_refused_with_nothing_queued(
    arguments: tuple[Any, ...], error: type[Exception], message: str, oracle: Oracle
) -> None:
    llm = make_llm(oracle.folder)
    with pytest.raises(error, match=message):
        llm.generate(*arguments)
    assert_empty(llm)
    assert llm.num_requests == 0


def test_2_bad_params_of_add_request_are_refused_with_nothing_queued(oracle: Oracle) -> None:
    llm = make_llm(oracle.folder)
    bad: Any
    for bad in (3, {"max_tokens": 3}, [greedy_params(1)]):
        with pytest.raises(TypeError, match="must be SamplingParams"):
            llm.add_request(GOOD, bad)
    assert_empty(llm)


def test_2_bad_keywords_are_a_type_error_that_names_them(oracle: Oracle) -> None:
    construct: Any = SamplingParams
    with pytest.raises(TypeError, match="max_new_tokens"):
        construct(max_new_tokens=5)
    with pytest.raises(TypeError, match="block_size"):
        LLM(oracle.folder, block_size=5)
    generate: Any = make_llm(oracle.folder).generate
    with pytest.raises(TypeError, match="max_tokens"):
        generate([GOOD], max_tokens=5)


# -- 12: the sampler's contract --------------------------------------------------------------------


def llm_with_logits(folder: Path, row: list[float], monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An engine whose model gives these logits to the first tokens, whatever the text, and no more.

    Everything around the model's answer is as ever.
    """
    llm = make_llm(folder)
    logits = torch.full((VOCAB_SIZE,), -torch.inf)
    logits[: len(row)] = torch.tensor(row)
    compute = llm.model_runner.model.compute_logits

    def fixed(hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(compute(hidden_states)) + logits

    monkeypatch.setattr(llm.model_runner.model, "compute_logits", fixed)
    return llm


@pytest.mark.parametrize("row", [[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [3.0] * 4])
def test_12_greedy_ties_go_to_the_lowest_id_in_a_mixed_batch(
    row: list[float], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_with_logits(oracle.folder, row, monkeypatch)
    params = [
        SamplingParams(t, max_tokens=20, seed=1, ignore_eos=True) for t in (0.0, 1.0, 0.0, 0.3)
    ]
    outputs = tokens_of(llm.generate([GOOD] * 4, params))
    lowest = row.index(max(row))
    assert outputs[0] == outputs[2] == [lowest] * 20
    assert len(set(outputs[1])) > 1, "at temperature 1 the others are drawn too"


def test_12_top_p_keeps_the_token_that_crosses_p(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_with_logits(oracle.folder, [math.log(p) for p in (0.1, 0.2, 0.3, 0.4)], monkeypatch)

    def seen(**options: Any) -> set[int]:  # noqa: ANN401 - any option
        params = SamplingParams(max_tokens=100, seed=5, **options)
        return set(llm.generate([GOOD], params)[0]["token_ids"])

    assert seen(top_p=0.6) == {2, 3}
    assert seen(top_p=0.3) == {3}
    assert seen(top_p=0.8) == {1, 2, 3}
    assert seen(top_p=1.0) == {0, 1, 2, 3}
    assert seen(top_k=2) == {2, 3}
    assert seen(top_k=3, top_p=0.5) == {2, 3}, "0.4 and 0.3 of the 0.9 that top-k left"


def test_12_top_k_1_is_greedy(oracle: Oracle) -> None:
    llm = make_llm(oracle.folder)
    prompts = oracle.prompts([3, 9, 1], 15, seed=5)
    params = [
        SamplingParams(1.0, max_tokens=15, top_k=1),
        SamplingParams(5.0, max_tokens=15),
        SamplingParams(0.5, max_tokens=15, top_k=1, top_p=0.5),
    ]
    outputs = tokens_of(llm.generate(prompts, params))
    assert outputs[0] == oracle.greedy(prompts[0], 15)
    assert outputs[2] == oracle.greedy(prompts[2], 15)


def test_12_a_seed_gives_the_same_tokens_whoever_shares_the_batch(oracle: Oracle) -> None:
    llm = make_llm(oracle.folder)
    seeded = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=15, seed=11)
    alone = llm.generate([GOOD], seeded)[0]["token_ids"]
    for others in ([greedy_params(15)], [SamplingParams(2.0, top_k=5)] * 3, [seeded]):
        outputs = llm.generate([*([[70, 71]] * len(others)), GOOD], [*others, seeded])
        assert outputs[-1]["token_ids"] == alone
