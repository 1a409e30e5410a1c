"""The public face: LLM(...), generate, add_request, step, abort, and the seeds of requests."""

from __future__ import annotations

import copy
import io
import json
import pickle
import sys
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.errors import TokenizerError
from support.fake_runner import Settings, make_engine
from support.models import VOCAB_SIZE
from support.oracle import (
    Narrator,
    Oracle,
    Watcher,
    assert_empty,
    greedy_params,
    make_llm,
    save_tokenizer,
    tokens_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from nanovllm.outputs import RequestOutput

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17]]
EOS = 1


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """A model with a tokenizer, whose end-of-sequence token is `EOS`."""
    oracle = Oracle.create(tmp_path_factory.mktemp("model"), {"eos_token_id": EOS})
    save_tokenizer(oracle.folder)
    return oracle


@pytest.fixture(scope="session")
def folder(oracle: Oracle) -> Path:
    return oracle.folder


def run_steps(llm: LLM) -> dict[int | None, RequestOutput]:
    """Step until nobody is left."""
    outputs: dict[int | None, RequestOutput] = {}
    while not llm.is_finished():
        for output in llm.step():
            assert output["seq_id"] not in outputs
            outputs[output["seq_id"]] = output
    return outputs


# -- generate --------------------------------------------------------------------------------------


def test_an_output_has_every_fact_of_its_request(folder: Path, oracle: Oracle) -> None:
    [output] = make_llm(folder).generate([[5, 6, 7]], greedy_params(4))
    token_ids = oracle.greedy([5, 6, 7], 4)
    assert EOS not in token_ids
    assert output == {
        "seq_id": 0,
        "text": " ".join(f"w{token_id}" for token_id in token_ids),
        "token_ids": token_ids,
        "logprobs": None,
        "finish_reason": "length",
        "reason": "max_tokens",
        "num_prompt_tokens": 3,
        "error": None,
    }


def test_an_output_can_be_read_as_nano_vllm_and_as_vllm_have_it(folder: Path) -> None:
    llm = make_llm(folder, max_model_len=8)
    of_text, of_ids, of_dict, refused = llm.generate(
        ["w5 w6", [5, 6], {"prompt": "w5 w6", "prompt_token_ids": [5, 6]}, [5] * 8],
        greedy_params(4),
    )
    assert [output.prompt for output in (of_text, of_ids, of_dict)] == ["w5 w6", None, "w5 w6"]
    for output in (of_text, of_ids, of_dict):
        assert output["text"] == output.text == output.outputs[0].text
        assert output["token_ids"] == output.token_ids == output.outputs[0].token_ids
        assert (output.prompt_token_ids, output.finished, len(output.outputs)) == ([5, 6], True, 1)
        assert json.loads(json.dumps(output)) == output == copy.deepcopy(output)
        again = pickle.loads(pickle.dumps(output))  # noqa: S301 - our own
        assert (again, again.prompt) == (output, output.prompt)
    assert (refused.prompt_token_ids, refused.outputs[0].text) == ([5] * 8, "")
    assert refused.finish_reason == "refused"
    with pytest.raises(AttributeError, match=r"no 'txt'; it has: seq_id, text, .*, outputs"):
        _ = of_text.txt  # type: ignore[attr-defined]


def test_what_scripts_for_vllm_say_and_is_not_here_says_what_to_write(folder: Path) -> None:
    llm: Any = make_llm(folder, quantization=None, trust_remote_code=True)
    for name, said in (
        ("chat", r"^LLM has no 'chat'; write generate\(get_tokenizer\(\)\.apply_chat_template"),
        ("has_unfinished_requests", r"; write not is_finished\(\)$"),
        ("abort_request", r"; write abort\(seq_id\)$"),
        ("nonsense", "; it has: abort, add_request, .*generate"),
    ):
        with pytest.raises(AttributeError, match=said):
            getattr(llm, name)
        assert not hasattr(llm, name)
    for call, options, said in (
        (llm.generate, {"prompt_token_ids": [[5]]}, "; give the lists of token ids as prompts"),
        (llm.generate, {"prompts": ["w5"], "lora_request": 1}, "; merge the adapter into"),
        (llm.stream, {"prompts": ["w5"], "priority": [1]}, "; it has: prompts, sampling_params"),
        (llm.add_request, {"request_id": "0", "prompt": "w5"}, "; write seq_id"),
    ):
        with pytest.raises(TypeError, match=rf"^LLMEngine\.{call.__name__}\(\) has no .*{said}"):
            call(**options)
    [output] = llm.generate(["w5"], greedy_params(2), lora_request=None, priority=None)
    with pytest.raises(AttributeError, match=r"^an output has no 'request_id'; write seq_id"):
        _ = output.request_id
    for option, said in (("block_size", "write kvcache_block_size"), ("quantization", "it has: ")):
        with pytest.raises(TypeError, match=rf"^LLM\(\) has no option '{option}'; {said}"):
            make_llm(folder, None, **{option: 16})


def test_arrays_of_token_ids_are_prompts(folder: Path) -> None:
    llm = make_llm(folder)
    right = tokens_of(llm.generate([[5, 6], [7, 8]], greedy_params(4)))
    arrays: list[Any] = [
        np.array([[5, 6], [7, 8]]),
        [np.array([5, 6], dtype=np.uint16), torch.tensor([7, 8])],
        [[np.int64(5), np.uint8(6)], (7, np.int32(8))],
        [{"prompt_token_ids": np.array([5, 6])}, array("i", [7, 8])],
    ]
    for prompts in arrays:
        assert tokens_of(llm.generate(prompts, greedy_params(4))) == right
    for wrong in ([np.array([5.0, 6.0])], [np.array(5)], [np.array([[5]])], [[np.True_]]):
        with pytest.raises(TypeError, match=r"^a (prompt|token id) must be"):
            llm.generate(wrong, greedy_params(4))  # type: ignore[arg-type]


def test_the_bar_is_for_a_person_who_looks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def shown(stream: io.StringIO | None, **options: bool) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        llm.generate([[5, 6], [7] * 9, [8]], greedy_params(4), **options)
        return "" if stream is None else stream.getvalue()

    llm = make_llm(folder, max_model_len=8)
    assert "Requests: 100%" in shown(Terminal())
    assert "3/3" in shown(Terminal(), use_tqdm=True)
    assert shown(Terminal(), use_tqdm=False) == shown(io.StringIO(), use_tqdm=True) == ""
    assert shown(None) == ""


def test_a_text_that_ends_by_itself_stops_and_does_not_show_its_last_token(folder: Path) -> None:
    llm = make_llm(folder)
    llm.model_runner.model.lm_head.weight.data[EOS] *= 100.0  # sure to win, or to lose
    outputs = llm.generate(
        [[token_id] for token_id in range(2, 12)], SamplingParams(temperature=0, max_tokens=9)
    )
    ended = [output for output in outputs if output["finish_reason"] == "stop"]
    assert ended
    for output in ended:
        assert output["reason"] == "eos"
        assert output["token_ids"][-1] == EOS
        assert output["token_ids"].count(EOS) == 1
        assert output["text"] == " ".join(f"w{t}" for t in output["token_ids"][:-1])


def test_outputs_come_in_the_prompts_order_whoever_ends_first(folder: Path, oracle: Oracle) -> None:
    lengths = [9, 1, 5, 3, 7]
    outputs = make_llm(folder, max_num_seqs=2).generate(
        [[20 + length] for length in lengths], [greedy_params(n) for n in lengths]
    )
    assert tokens_of(outputs) == [oracle.greedy([20 + n], n) for n in lengths]
    assert [output["seq_id"] for output in outputs] == [0, 1, 2, 3, 4]


def test_text_and_token_ids_are_the_same_prompt(folder: Path) -> None:
    llm = make_llm(folder)
    texts = [" ".join(f"w{token_id}" for token_id in prompt) for prompt in PROMPTS]
    by_text = llm.generate(texts, greedy_params(5))
    by_ids = llm.generate(PROMPTS, greedy_params(5))
    some_of_each: list[str | list[int]] = [PROMPTS[0], texts[1], PROMPTS[2]]
    mixed = llm.generate(some_of_each, greedy_params(5))
    assert tokens_of(by_text) == tokens_of(by_ids) == tokens_of(mixed)
    assert [output["text"] for output in by_text] == [output["text"] for output in mixed]
    assert [output["num_prompt_tokens"] for output in by_text] == [3, 1, 9]


def test_prompts_are_left_as_they_were(folder: Path) -> None:
    prompts = [list(prompt) for prompt in PROMPTS]
    make_llm(folder).generate(prompts, greedy_params(5))
    assert prompts == PROMPTS


def test_one_sampling_params_is_for_all_and_a_list_is_one_for_each(folder: Path) -> None:
    llm = make_llm(folder)
    for_all = llm.generate(PROMPTS, greedy_params(4))
    assert [len(output["token_ids"]) for output in for_all] == [4, 4, 4]
    for_each = llm.generate(PROMPTS, [greedy_params(n) for n in (1, 2, 3)])
    assert tokens_of(for_each) == [tokens_of(for_all)[n - 1][:n] for n in (1, 2, 3)]
    for output in llm.generate(PROMPTS):
        assert len(output["token_ids"]) == 64 or output["token_ids"][-1] == EOS


def test_no_prompts_give_no_outputs(folder: Path) -> None:
    llm = make_llm(folder)
    assert llm.generate([], greedy_params(4)) == []
    assert llm.generate([], []) == []
    assert_empty(llm)


def test_a_folder_without_tokenizer_runs_token_ids_and_refuses_text(tmp_path: Path) -> None:
    llm = make_llm(Oracle.create(tmp_path).folder)
    assert llm.generate([[5, 6]], greedy_params(3))[0]["text"] == ""
    prompts: list[str | list[int]] = [[5, 6], "w5 w6"]
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        llm.generate(prompts, greedy_params(3))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        llm.add_request("w5 w6")
    assert_empty(llm)


def test_a_folder_with_half_a_tokenizer_refuses_text(tmp_path: Path) -> None:
    llm = make_llm(Oracle.create(tmp_path).folder)
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        llm.generate(["w5 w6"], greedy_params(3))
    assert_empty(llm)


# -- request by request ----------------------------------------------------------------------------


def test_step_by_step_gives_what_generate_gives(folder: Path) -> None:
    params = [greedy_params(n) for n in (3, 7, 5)]
    together = make_llm(folder).generate(PROMPTS, params)
    llm = make_llm(folder)
    assert llm.is_finished()
    assert llm.step() == []
    seq_ids = [llm.add_request(*request) for request in zip(PROMPTS, params, strict=True)]
    assert seq_ids == [0, 1, 2]
    assert not llm.is_finished()
    outputs = run_steps(llm)
    assert [outputs[seq_id] for seq_id in seq_ids] == together
    assert_empty(llm)


def test_each_output_comes_from_the_step_in_which_the_request_ended(folder: Path) -> None:
    llm = make_llm(folder)
    for num_tokens in (2, 1, 2):
        llm.add_request([5, 6], greedy_params(num_tokens))
    ended = [[output["seq_id"] for output in llm.step()] for _ in range(3)]
    assert ended == [[1], [0, 2], []]
    assert llm.engine_step == 2


def test_a_late_request_joins_those_that_run(folder: Path, oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(folder, watcher)
    llm.add_request(PROMPTS[0], greedy_params(8))
    llm.step()
    llm.step()
    llm.add_request(PROMPTS[2], greedy_params(8))
    outputs = run_steps(llm)
    assert watcher.most_running == 2
    assert outputs[0]["token_ids"] == oracle.greedy(PROMPTS[0], 8)
    assert outputs[1]["token_ids"] == oracle.greedy(PROMPTS[2], 8)


def test_generate_refuses_while_requests_are_unfinished(folder: Path) -> None:
    llm = make_llm(folder)
    llm.add_request([5, 6], greedy_params(2))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"1 requests.*abort\(\)"):
            llm.generate(PROMPTS, greedy_params(4))
        assert len(llm.step()) == len(llm.requests) ^ 1
    assert len(llm.generate(PROMPTS, greedy_params(4))) == 3


def test_a_waiting_request_can_be_aborted(folder: Path, oracle: Oracle) -> None:
    llm = make_llm(folder, max_num_seqs=1)
    for prompt in PROMPTS:
        llm.add_request(prompt, greedy_params(4))
    llm.step()
    output = llm.abort(1)
    assert (output["token_ids"], output["text"]) == ([], "")
    assert (output["finish_reason"], output["reason"]) == ("abort", "aborted")
    outputs = run_steps(llm)
    assert {seq_id: outputs[seq_id]["token_ids"] for seq_id in outputs} == {
        0: oracle.greedy(PROMPTS[0], 4),
        2: oracle.greedy(PROMPTS[2], 4),
    }
    assert_empty(llm)


@pytest.mark.parametrize("budget", [4, 1000])
def test_a_running_request_can_be_aborted_with_what_it_has(
    budget: int, folder: Path, oracle: Oracle
) -> None:
    llm = make_llm(folder, max_num_batched_tokens=budget)
    llm.add_request(PROMPTS[0], greedy_params(9))
    long = llm.add_request(PROMPTS[2], greedy_params(9))
    llm.step()
    llm.step()  # with a budget of 4, in the middle of its prompt
    output = llm.abort(long)
    has = 0 if budget == 4 else 2
    assert output["token_ids"] == oracle.greedy(PROMPTS[2], 9)[:has]
    assert output["finish_reason"] == "abort"
    llm.scheduler.check()
    assert run_steps(llm)[0]["token_ids"] == oracle.greedy(PROMPTS[0], 9)
    assert_empty(llm)


def test_only_an_unfinished_request_can_be_aborted(folder: Path) -> None:
    llm = make_llm(folder)
    seq_id = llm.add_request([5, 6], greedy_params(1))
    llm.step()
    for gone in (seq_id, 7, -1):
        with pytest.raises(KeyError, match=f"seq_id {gone}"):
            llm.abort(gone)


# -- seeds -----------------------------------------------------------------------------------------

SEEDED = [SamplingParams(temperature=1.0, max_tokens=20, seed=seed) for seed in (3, 4, 5)]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 2},
        {"num_kvcache_blocks": 9},
        {"num_kvcache_blocks": 9, "max_num_batched_tokens": 3, "enable_prefix_caching": False},
        {"kvcache_block_size": 256},
        {"seed": 99},
    ],
    ids=str,
)
def test_a_seed_gives_the_same_tokens_however_the_request_runs(
    options: dict[str, Any], folder: Path
) -> None:
    plain = make_llm(folder)
    alone = [plain.generate([p], sp) for p, sp in zip(PROMPTS, SEEDED, strict=True)]
    right = [output["token_ids"] for [output] in alone]
    watcher = Watcher()
    llm = make_llm(folder, watcher, **options)

    for order in ([0, 1, 2], [2, 0, 1]):
        outputs = llm.generate(
            [PROMPTS[i] for i in order] + [[30]],
            [SEEDED[i] for i in order] + [SamplingParams(temperature=2.0, max_tokens=20)],
        )
        assert tokens_of(outputs)[:3] == [right[i] for i in order]
    if options.get("num_kvcache_blocks") == 9:
        assert watcher.num_preemptions.total() > 0


def test_different_seeds_and_no_seeds_give_different_tokens(folder: Path) -> None:
    llm = make_llm(folder)
    unseeded = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    by_seed = llm.generate(
        [[5]] * 3,
        [SamplingParams(max_tokens=20, seed=seed, ignore_eos=True) for seed in (1, 2, 2**63)],
    )
    runs = [*by_seed, *llm.generate([[5]] * 2, unseeded), *llm.generate([[5]], unseeded)]
    assert len({tuple(output["token_ids"]) for output in runs}) == len(runs)


def test_requests_without_a_seed_repeat_with_the_engines_seed(folder: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20)
    runs = [tokens_of(make_llm(folder, seed=s).generate(PROMPTS, params)) for s in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]


def test_every_seed_that_an_engine_takes_is_its_own(folder: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20)
    runs = []
    for seed in (0, 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1):
        try:
            llm = make_llm(folder, seed=seed)
        except ValueError as error:
            assert str(error).startswith("seed must be")  # noqa: PT017 - as right as taking it
        else:
            runs.append(str(llm.generate(PROMPTS, params)))
    assert len(runs) >= 3
    assert len(set(runs)) == len(runs)


# -- engines ---------------------------------------------------------------------------------------


def test_engines_count_for_themselves(folder: Path) -> None:
    first, second = make_llm(folder), make_llm(folder)
    first.generate(PROMPTS, greedy_params(4))
    assert (first.num_requests, first.engine_step) == (3, 4)
    assert (second.num_requests, second.engine_step) == (0, 0)
    assert second.generate([[5]], greedy_params(2))[0]["seq_id"] == 0
    assert first.generate([[5]], greedy_params(2))[0]["seq_id"] == 3
    assert second.engine_step == 2


def test_the_articles_options_are_accepted(folder: Path) -> None:
    llm = LLM(str(folder), enforce_eager=True, tensor_parallel_size=1, num_kvcache_blocks=4)
    assert llm.config.kvcache_block_size == 256
    assert len(llm.generate([[5]], SamplingParams(temperature=0.6, max_tokens=3))) == 1


# -- prompts and arguments that are refused --------------------------------------------------------


GOOD = [5, 6, 7]


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_bad_max_tokens_are_a_value_error(max_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens.*{max_tokens}"):
        SamplingParams(max_tokens=max_tokens)


def test_bad_max_tokens_of_a_half_token_are_a_type_error() -> None:
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
def test_bad_prompts_are_refused_with_nothing_queued(
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
def test_bad_arguments_of_generate_are_refused_with_nothing_queued(
    arguments: tuple[Any, ...], error: type[Exception], message: str, oracle: Oracle
) -> None:
    llm = make_llm(oracle.folder)
    with pytest.raises(error, match=message):
        llm.generate(*arguments)
    assert_empty(llm)
    assert llm.num_requests == 0


def test_bad_params_of_add_request_are_refused_with_nothing_queued(oracle: Oracle) -> None:
    llm = make_llm(oracle.folder)
    bad: Any
    for bad in (3, {"max_tokens": 3}, [greedy_params(1)]):
        with pytest.raises(TypeError, match="must be SamplingParams"):
            llm.add_request(GOOD, bad)
    assert_empty(llm)


def test_bad_keywords_are_a_type_error_that_names_them(oracle: Oracle) -> None:
    construct: Any = SamplingParams
    with pytest.raises(TypeError, match="max_new_tokens"):
        construct(max_new_tokens=5)
    with pytest.raises(TypeError, match="block_size"):
        LLM(oracle.folder, block_size=5)
    generate: Any = make_llm(oracle.folder).generate
    with pytest.raises(TypeError, match="max_tokens"):
        generate([GOOD], max_tokens=5)


def test_half_a_character_in_a_prompt_is_named() -> None:
    engine = make_engine(Settings())
    with pytest.raises(ValueError, match="not valid Unicode at character 3: half a surrogate pair"):
        engine.add_request("abc\ud800", greedy_params(3))
    assert not engine.requests
