"""Stop token ids and stop strings: when a request ends by them, and what comes out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from nanovllm import LLM, Observer, SamplingParams
from nanovllm.assets import TINY_QWEN3
from nanovllm.errors import TokenizerError
from nvtrace import events as ev
from nvtrace import read_trace, record
from nvtrace.check import check
from nvtrace.events import EngineReady
from support.fake_runner import Settings, make_engine
from support.models import edit_config
from support.oracle import Oracle, greedy_params, make_llm, save_tokenizer, tokens_of
from support.recording import Recording
from support.workload import Request, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The tiny Qwen3, with a small pool."""
    return LLM(TINY_QWEN3, num_kvcache_blocks=8)


@pytest.fixture(scope="module")
def prompt(llm: LLM) -> list[int]:
    return llm.tokenizer.apply_chat_template("introduce yourself")


def greedy(**params: Any) -> SamplingParams:  # noqa: ANN401 - SamplingParams' own
    return SamplingParams(temperature=0, max_tokens=params.pop("max_tokens", 40), **params)


# -- at the door -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"stop": "end"}, ("end",)),
        ({"stop": ["a", "bc"]}, ("a", "bc")),
        ({"stop": None}, ()),
        ({"stop": []}, ()),
        ({"stop_token_ids": [3, 4]}, (3, 4)),
        ({"stop_token_ids": None}, ()),
    ],
)
def test_stop_conditions_are_kept_as_tuples(given: dict[str, Any], kept: tuple[object]) -> None:
    [name] = given
    assert getattr(SamplingParams(**given), name) == kept


def test_a_stop_token_outside_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="token id 999999 is outside the vocabulary"):
        llm.add_request([5], greedy(stop_token_ids=[999999]))
    assert llm.is_finished()


def test_stop_strings_without_a_tokenizer_are_refused(tmp_path: Any) -> None:  # noqa: ANN401
    llm = make_llm(Oracle.create(tmp_path).folder)
    with pytest.raises(TokenizerError, match="stop strings need a tokenizer"):
        llm.generate([[5]], greedy(stop="x"))
    assert llm.is_finished()


# -- what comes out --------------------------------------------------------------------------------


def test_a_stop_string_ends_the_text_before_it(llm: LLM, prompt: list[int]) -> None:
    [whole] = llm.generate([prompt], greedy())
    stop = whole["text"][20:27]
    [output] = llm.generate([prompt], greedy(stop=["never said", stop]))
    assert (output["finish_reason"], output["reason"]) == ("stop", "stop_string")
    assert output["text"] == whole["text"][: whole["text"].index(stop)]
    num_tokens = len(output["token_ids"])
    assert output["token_ids"] == whole["token_ids"][:num_tokens]
    assert stop in llm.tokenizer.decode(output["token_ids"]), "the tokens are all there"
    assert stop not in llm.tokenizer.decode(output["token_ids"][:-1]), "and none too many"


def test_a_stop_string_that_never_comes_changes_nothing(llm: LLM, prompt: list[int]) -> None:
    [whole] = llm.generate([prompt], greedy())
    [output] = llm.generate([prompt], greedy(stop=whole["text"][-1] + "never said"))
    assert output == whole | {"seq_id": output["seq_id"]}


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_stop_token_ends_the_request_and_is_its_last(
    llm: LLM, prompt: list[int], ignore_eos: bool
) -> None:
    [whole] = llm.generate([prompt], greedy())
    token_id = whole["token_ids"][10]
    first = whole["token_ids"].index(token_id)
    [output] = llm.generate([prompt], greedy(stop_token_ids=[token_id], ignore_eos=ignore_eos))
    assert (output["finish_reason"], output["reason"]) == ("stop", "stop_token")
    assert output["token_ids"] == whole["token_ids"][: first + 1]
    assert output["text"] == llm.tokenizer.decode(output["token_ids"])


def test_one_request_stops_and_its_neighbours_go_on(llm: LLM, prompt: list[int]) -> None:
    [whole] = llm.generate([prompt], greedy())
    stop = whole["text"][10:13]
    outputs = llm.generate([prompt] * 3, [greedy(), greedy(stop=stop), greedy()])
    assert [output["reason"] for output in outputs] == ["max_tokens", "stop_string", "max_tokens"]
    assert outputs[0]["token_ids"] == outputs[2]["token_ids"] == whole["token_ids"]


# -- the order of reasons, and the trace -----------------------------------------------------------

PROMPT = [1, 2, 1]
ANSWER = Request(PROMPT, max_tokens=12).answer()[0]
ENDING: dict[str, dict[str, Any]] = {
    "stop_string": {"stop": (chr(ord("a") + ANSWER[3]),)},
    "stop_token": {"stop_token_ids": (ANSWER[3],)},
    "max_tokens": {"max_tokens": ANSWER.index(ANSWER[3]) + 1},
}


def test_a_stop_string_comes_before_a_stop_token_and_that_before_the_limits() -> None:
    names = list(ENDING)
    for first in range(len(names)):
        changes: dict[str, Any] = {}
        for name in names[first:]:
            changes |= ENDING[name]
        request = replace(Request(PROMPT, max_tokens=12), **changes)
        engine = make_engine(Settings())
        [output] = engine.generate(
            [request.prompt],
            SamplingParams(
                temperature=0,
                max_tokens=request.max_tokens,
                ignore_eos=True,
                stop=request.stop,
                stop_token_ids=request.stop_token_ids,
            ),
        )
        assert (output["token_ids"], output["reason"]) == request.answer()
        assert output["reason"] == names[first]


def test_a_stopped_request_gives_its_blocks_back_in_the_same_step() -> None:
    workload = Workload(
        Settings(num_kvcache_blocks=8), [Request(PROMPT, max_tokens=12, stop=("d", "e", "f"))]
    )
    recording = Recording(workload)
    transitions = [r for r in recording.records if isinstance(r, ev.StateTransition)]
    released = [r for r in recording.records if isinstance(r, ev.BlocksRelease)]
    last_step = [r for r in recording.records if isinstance(r, ev.StepEnd)][-1]
    assert transitions[-1].reason == "stop_string"
    assert transitions[-1].step == released[-1].step == last_step.step
    assert last_step.free_blocks == 8
    [enqueued] = [r for r in recording.records if isinstance(r, ev.RequestEnqueue)]
    assert enqueued.stop == ["d", "e", "f"]


# -- the three files that name an end of sequence --------------------------------------------------


class EndKeeper(Observer):
    """Keeps what ENGINE_READY says of the ends."""

    def __init__(self) -> None:
        self.ends: dict[int, str] = {}

    def engine_ready(
        self, num_kvcache_blocks: int, eos_token_ids: Sequence[int], eos_sources: Sequence[str]
    ) -> None:
        """Keep both."""
        assert num_kvcache_blocks
        self.ends = dict(zip(eos_token_ids, eos_sources, strict=True))


@pytest.mark.parametrize("place", ["config.json", "generation_config.json", "tokenizer"])
def test_an_end_that_only_one_file_names_ends_a_text(
    place: str, oracle: Oracle, tmp_path: Path
) -> None:
    copy = shutil.copytree(oracle.folder, tmp_path / "copy")
    [prompt] = oracle.prompts([6], 8)
    with_no_end = make_llm(oracle.folder).generate([prompt], greedy_params(8, ignore_eos=True))
    [tokens] = tokens_of(with_no_end)
    end = tokens[3]
    ids = dict.fromkeys(("config.json", "generation_config.json", "tokenizer"), 1) | {place: end}
    save_tokenizer(copy, eos=f"w{ids['tokenizer']}" if place == "tokenizer" else "<end>")
    edit_config(copy, {"eos_token_id": ids["config.json"]})
    generation = {"eos_token_id": [ids["generation_config.json"]]}
    (copy / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")

    keeper = EndKeeper()
    llm = make_llm(copy, keeper)
    [output] = llm.generate([prompt], greedy_params(8))

    assert output["token_ids"] == tokens[: tokens.index(end) + 1]
    assert output["finish_reason"] == "stop"
    assert keeper.ends == {1: ", ".join(name for name in ids if name != place), end: place}
    assert tokens_of(llm.generate([prompt], greedy_params(8, ignore_eos=True))) == [tokens]
    with record(tmp_path / "trace.jsonl") as recorder:
        make_llm(copy, recorder).generate([prompt], greedy_params(8))
    [ready] = [e for e in read_trace(tmp_path / "trace.jsonl") if isinstance(e, EngineReady)]
    assert dict(zip(ready.eos_token_ids, ready.eos_sources or [], strict=True)) == keeper.ends
    assert [*check(read_trace(tmp_path / "trace.jsonl"))] == []
