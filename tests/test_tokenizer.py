"""The tokenizer of a checkpoint: special tokens of its own, and chat templates."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer as Words
from tokenizers import processors
from transformers import AutoTokenizer

from nanovllm import Observer
from nanovllm.errors import TokenizerError
from nvtrace.scenarios import SCENARIOS, Options, run_scenario
from support.oracle import make_llm, save_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from nanovllm.engine.sequence import Sequence
    from support.oracle import Oracle

BOS = "w2"
TEMPLATE = (
    "{{ bos_token }} w3 {{ messages[0].content }}{% if enable_thinking is false %} w4{% endif %}"
)


@pytest.fixture
def copy(oracle: Oracle, tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return shutil.copytree(oracle.folder, tmp_path / "copy")


@pytest.fixture
def beginning(copy: Path) -> Path:
    """A checkpoint whose tokenizer puts a BOS before each text, as its template does."""
    save_tokenizer(copy, bos=BOS)
    (copy / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return copy


def test_a_plain_text_gets_one_bos_and_a_template_s_text_keeps_its_one(beginning: Path) -> None:
    llm = make_llm(beginning)
    tokenizer = AutoTokenizer.from_pretrained(beginning)
    turn = [{"role": "user", "content": "w9"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False)
    assert text == "w2 w3 w9"
    for prompt, expected in (
        ("w9", [2, 9]),
        (text, [2, 3, 9]),
        (llm.tokenizer.apply_chat_template("w9"), [2, 3, 9]),
        (llm.tokenizer.apply_chat_template("w9", enable_thinking=False), [2, 3, 9, 4]),
    ):
        assert llm.input_processor.one(prompt, None)[0] == expected


@pytest.mark.parametrize(
    ("single", "special", "cases"),
    [
        ("w2 $A", ["w2"], {"w9": [2, 9], "w2 w3 w9": [2, 3, 9], "w2": [2], "w0": [2, 0]}),
        ("w2 w7 $A", ["w2", "w7"], {"w9": [2, 7, 9], "w2 w7 w9": [2, 7, 9]}),
        ("w2 $A w8", ["w2", "w8"], {"w9": [2, 9, 8], "w2 w3": [2, 3], "w8": [2, 8, 8]}),
        ("$A w8", ["w8"], {"w9": [9, 8], "w8 w9": [8, 9, 8]}),
        ("$A", [], {"w9": [9], "w2 w9": [2, 9]}),
    ],
    ids=["bos", "two before", "around", "behind", "nothing"],
)
@pytest.mark.parametrize("bos", [None, "w2"])
def test_what_a_tokenizer_puts_in_front_comes_once_whatever_it_is_called(
    single: str, special: list[str], cases: dict[str, list[int]], bos: str | None, copy: Path
) -> None:
    save_tokenizer(copy, bos=bos)
    words = Words.from_file(str(copy / "tokenizer.json"))
    pairs = [(token, words.token_to_id(token)) for token in special]
    words.post_processor = processors.TemplateProcessing(single, special_tokens=pairs)
    words.save(str(copy / "tokenizer.json"))
    encode = make_llm(copy).tokenizer.encode
    assert {text: encode(text) for text in cases} == cases


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_gives_the_templates_tokens_to_the_model(name: str, beginning: Path) -> None:
    class Hearer(Observer):
        def request_enqueue(self, seq: Sequence, waiting_len: int) -> None:
            assert waiting_len
            heard.append(seq.token_ids[:])

    heard: list[list[int]] = []
    options = Options(
        model=beginning, max_tokens=1, chat_template_kwargs={"enable_thinking": False}
    )
    run_scenario(SCENARIOS[name], Hearer(), options)
    assert heard
    for token_ids in heard:
        assert token_ids[:2] == [2, 3]
        assert token_ids.count(2) == 1
        assert token_ids[-1] == 4


def test_switches_of_a_template_that_is_not_there_are_refused(copy: Path) -> None:
    save_tokenizer(copy)
    tokenizer = make_llm(copy).tokenizer
    assert tokenizer.apply_chat_template("w9") == [9]
    with pytest.raises(TokenizerError, match="has no chat template, so enable_thinking"):
        tokenizer.apply_chat_template("w9", enable_thinking=False)
