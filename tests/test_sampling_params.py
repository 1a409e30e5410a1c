"""SamplingParams: what is accepted, what is refused at the door, and that what is accepted runs."""

from __future__ import annotations

import copy
import dataclasses
import math
import numbers
import pickle
import re
import sys
from enum import Enum, IntEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nanovllm import SamplingParams
from nanovllm.assets import TINY_QWEN3
from nvtrace.envelope import Footer
from nvtrace.reader import read_trace
from nvtrace.recorder import record
from support.oracle import Oracle, make_llm, tokens_of

if TYPE_CHECKING:
    from pathlib import Path


class Whole(int):
    """Some library's int."""


class Real(float):
    """Some library's float."""


class Text(str):
    """Some library's str, which shows itself otherwise."""

    __slots__ = ()

    def __str__(self) -> str:
        return "shown otherwise"


class Small(IntEnum):
    """A number with a name."""

    TWO = 2


class Word(str, Enum):  # noqa: UP042 - what people wrote before StrEnum: its str() is "Word.FIVE"
    """A word with a name."""

    FIVE = "w5"


def plain_of(value: object) -> object:
    """The same as Python's own."""
    if isinstance(value, (list, np.ndarray)):
        return [plain_of(each) for each in value]
    assert isinstance(value, numbers.Real)
    return int(value) if isinstance(value, numbers.Integral) else float(value)


LEGAL: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1e-6, 0.6, 1, 100.0],
    "max_tokens": [1, 2, 10**6],
    "ignore_eos": [True, False],
    "top_k": [None, 1, 50, 10**6],
    "top_p": [1e-9, 0.5, 1, 1.0],
    "seed": [None, 0, 1, 2**64 - 1],
    "stop_token_ids": [(), (3,), (3, 4, 3)],
    "stop": [(), ("w5",), ("a", "\n\n", "</s>")],
    "logprobs": [None, 0, 1, 20],
}
OUT_OF_RANGE: dict[str, list[Any]] = {
    "temperature": [-0.1, -1, 1e7, math.nan, math.inf, -math.inf],
    "max_tokens": [0, -1, -(10**9), 2**31],
    "top_k": [-2, 2**31],
    "top_p": [0, 0.0, -0.5, 1.0001, 2, math.nan, math.inf],
    "seed": [-2, 2**64],
    "stop_token_ids": [[-1], [3, -1], [2**31]],
    "stop": ["", [""], ["a", ""]],
    "logprobs": [-1, 2**31],
}
OF_WRONG_TYPE: dict[str, list[Any]] = {
    "temperature": ["0.6", None, True, [0.6], 1j],
    "max_tokens": [1.5, 2.0, "5", None, True, [5], math.nan, math.inf],
    "ignore_eos": [0, 1, None, "yes"],
    "top_k": [1.5, 5.0, "5", True, [5]],
    "top_p": ["0.9", None, True, [0.9], 1j],
    "seed": [1.5, 3.0, "5", True, [5]],
    "stop_token_ids": [3, "3", [1.5], [True], [None], {3}],
    "stop": [3, True, [3], [None], {"a"}, b"a"],
    "logprobs": [1.0, "1", True, [1]],
}


def pairs(values: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, listed in values.items() for value in listed]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Oracle.create(tmp_path_factory.mktemp("model")).folder


def test_the_defaults_are_those_of_nano_vllm() -> None:
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (1.0, 64, False)
    assert (params.top_k, params.top_p, params.seed) == (None, 1.0, None)


def test_every_option_has_its_cases_here() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(LEGAL) == set(OF_WRONG_TYPE) == names
    assert set(OUT_OF_RANGE) == names - {"ignore_eos"}


@pytest.mark.parametrize(("name", "value"), pairs(LEGAL))
def test_a_legal_value_is_kept(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), pairs(OUT_OF_RANGE), ids=lambda value: str(value)[:12])
def test_a_value_out_of_range_is_a_value_error_that_names_the_option(
    name: str, value: object
) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .*{re.escape(str(value)[:4])}"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "number"), [("temperature", 10**400), ("max_tokens", 10**5000)], ids=["400", "5000"]
)
def test_a_number_of_thousands_of_digits_is_not_written_out(name: str, number: int) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .* not a number of \d+ bits$"):
        SamplingParams(**{name: number})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), pairs(OF_WRONG_TYPE))
def test_a_value_of_a_wrong_type_is_a_type_error_that_names_the_option(
    name: str, value: object
) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be "):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_an_unknown_option_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="max_token'"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n", 1), ("best_of", 1), ("best_of", None), ("min_p", 0), ("min_p", np.float64(0))),
        *(("repetition_penalty", 1.0), ("presence_penalty", 0), ("frequency_penalty", 0.0)),
        *(("detokenize", True), ("detokenize", False), ("skip_special_tokens", True)),
        *(("prompt_logprobs", None), ("logits_processors", None), ("min_tokens", 0)),
    ],
    ids=repr,
)
def test_options_of_vllm_that_change_nothing_are_taken(name: str, value: object) -> None:
    options: dict[str, Any] = {name: value}
    params = SamplingParams(max_tokens=5, **options)
    assert params == SamplingParams(max_tokens=5)
    assert dataclasses.replace(params, top_k=3, **options) == SamplingParams(max_tokens=5, top_k=3)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params  # noqa: S301 - ours


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("n", 2, "give the prompt n times"),
        ("n", "1", "give the prompt n times"),
        *((name, 0.1, "it has: temperature, max_tokens") for name in ("min_p", "presence_penalty")),
        ("repetition_penalty", 1.1, "it has: temperature, max_tokens"),
        ("repetition_penalty", np.array([1.0, 1.1]), "it has: temperature, max_tokens"),
        ("prompt_logprobs", 0, "it has: temperature, max_tokens"),
        ("skip_special_tokens", False, "it has: temperature, max_tokens"),
        ("max_new_tokens", None, "it has: temperature, max_tokens"),
    ],
    ids=repr,
)
def test_an_option_of_vllm_that_would_change_something_says_what_there_is(
    name: str, value: object, said: str
) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(
        TypeError, match=rf"^SamplingParams\(\) has no option '{name}'; {re.escape(said)}"
    ):
        SamplingParams(**options)


@pytest.mark.parametrize(("name", "value"), [("top_k", -1), ("top_k", 0), ("seed", -1)], ids=repr)
@pytest.mark.parametrize("kind", [int, np.int32, Whole])
def test_vllms_values_for_off_are_none(name: str, value: int, kind: type[int]) -> None:
    options: dict[str, Any] = {name: kind(value)}
    assert getattr(SamplingParams(**options), name) is None
    options[name] = False
    with pytest.raises(TypeError, match=f"{name} must be a whole number, not False"):
        SamplingParams(**options)


def test_params_do_not_change_after_they_were_checked() -> None:
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", np.int64(3)),
        ("top_k", np.int32(2)),
        ("seed", np.int64(7)),
        ("seed", np.uint64(2**63 + 1)),
        ("temperature", np.float32(0.5)),
        ("temperature", Fraction(1, 2)),
        ("top_p", np.float64(0.5)),
        ("top_p", Fraction(1, 2)),
        ("temperature", Real(0.5)),
        ("max_tokens", Whole(3)),
        ("logprobs", Small.TWO),
        ("seed", Whole(7)),
        ("stop_token_ids", np.array([5, 6])),
        ("stop_token_ids", [np.int64(5), Whole(6), Small.TWO]),
    ],
    ids=repr,
)
def test_numbers_of_other_libraries_do_what_pythons_do(
    name: str, value: object, folder: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_tokens": 3, "seed": 1}
    plain: Any = plain_of(value)
    expected = make_llm(folder).generate([[5, 6]], SamplingParams(**options | {name: plain}))

    params = SamplingParams(**options | {name: value})
    assert repr(getattr(params, name)) == repr(getattr(SamplingParams(**{name: plain}), name))
    path = tmp_path / "trace.jsonl"
    with record(path) as observer:
        llm = make_llm(folder, observer)
        prompt: Any = [Whole(5), np.int64(6)]
        outputs = llm.generate([prompt], params)

    assert outputs == expected
    assert isinstance([*read_trace(path, warn=pytest.fail)][-1], Footer)


@pytest.mark.parametrize(
    "stop", [Text("w5"), np.str_("w5"), [Word.FIVE, Text("w6")], np.array(["w5", "w6"])], ids=repr
)
def test_texts_of_other_libraries_do_what_pythons_do(stop: object, tmp_path: Path) -> None:
    params = SamplingParams(stop=stop, max_tokens=3)  # type: ignore[arg-type]
    assert {type(text) for text in params.stop or ()} == {str}
    assert (params.stop or ())[0] == "w5"
    path = tmp_path / "trace.jsonl"
    with record(path) as observer:
        llm = make_llm(TINY_QWEN3, observer)
        outputs = llm.generate([Text("hello"), np.str_("world")], params)
    assert [output.prompt for output in outputs] == ["hello", "world"]
    assert [type(output.prompt) for output in outputs] == [str, str]
    assert isinstance([*read_trace(path, warn=pytest.fail)][-1], Footer)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", t) for t in (5e-324, 1e-320, 1e-45, 1e-39, 1e-30)),
        *(("temperature", t) for t in (1e38, 1e39, sys.float_info.max, 10**400)),
        *(("top_p", p) for p in (5e-324, 1e-45, Fraction(1, 10**400), 1 - 2**-53)),
        *(("top_k", k) for k in (2**31, 2**63 - 1, 2**63, 10**30)),
        *(("max_tokens", n) for n in (2**63, 10**30)),
        ("seed", 2**64 - 1),
    ],
    ids=lambda value: str(value)[:12],
)
def test_an_extreme_value_is_refused_at_the_door_or_runs(
    name: str, value: float, folder: Path
) -> None:
    """Inside a step it would end the requests of everybody else in the batch as well."""
    try:
        extreme = SamplingParams(**{name: value})  # type: ignore[arg-type]
    except ValueError as error:
        assert str(error).startswith(name)  # noqa: PT017 - refusing is one of two right answers
        return
    llm = make_llm(folder, max_model_len=8)
    alone = llm.generate([[7, 8]], SamplingParams(seed=1, max_tokens=4))
    outputs = llm.generate([[5, 6], [7, 8]], [extreme, SamplingParams(seed=1, max_tokens=4)])
    assert len(outputs[0]["token_ids"]) == 6
    assert tokens_of(outputs[1:]) == tokens_of(alone)


@pytest.mark.parametrize("temperature", [1e-4, 1e-20, 1e-40])
def test_a_temperature_near_0_is_nearly_greedy(temperature: float, folder: Path) -> None:
    llm = make_llm(folder)
    prompts = [[5, 6, 7], [8]]
    greedy = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    assert tokens_of(llm.generate(prompts, SamplingParams(temperature, max_tokens=8))) == (
        tokens_of(greedy)
    )
