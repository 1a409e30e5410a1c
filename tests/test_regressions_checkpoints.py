"""Kinds of fault with checkpoints: 13, the loader is silent, and 14, RoPE and dtype.

Goes on with `test_regressions.py`. What the loader and the config reader do by themselves is tested
elsewhere; here it is what a user of `LLM` sees.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Words
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import Observer
from nanovllm.errors import ModelConfigError, TokenizerError, WeightsError
from nvtrace import read_trace, record
from nvtrace.check import check
from nvtrace.events import EngineReady
from nvtrace.scenarios import SCENARIOS, Options, run_scenario
from support.models import edit_config, make_reference, save_reference
from support.oracle import Narrator, Oracle, greedy_params, make_llm, save_tokenizer, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from nanovllm.config import Config
    from nanovllm.engine.sequence import Sequence as EngineSequence
    from nanovllm.utils.model_config import ModelConfig


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Oracle.create(tmp_path_factory.mktemp("model")).folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return shutil.copytree(folder, tmp_path / "copy")


# -- 13: the loader is silent ----------------------------------------------------------------------

NORM = "model.norm.weight"


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def name_a_shard_that_is_not_there(folder: Path) -> None:
    index = {"weight_map": {NORM: "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


SPOILT: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["no .safetensors file"]),
    "a shard is missing": (
        name_a_shard_that_is_not_there,
        ["model.safetensors.index.json", "model-00002-of-00002.safetensors"],
    ),
    "a tensor is missing": (
        lambda f: change_tensors(f, lambda tensors: tensors.pop(NORM)),
        [NORM, "model.norm"],
    ),
    "an unknown tensor": (
        lambda f: change_tensors(f, lambda tensors: tensors.update(surplus=torch.ones(1))),
        ["model.safetensors", "surplus"],
    ),
    "a wrong shape": (
        lambda f: change_tensors(f, lambda tensors: tensors.update({NORM: torch.ones(63)})),
        ["model.safetensors", NORM, "(63,)", "(64,)"],
    ),
    "a shape that would broadcast": (
        lambda f: change_tensors(f, lambda tensors: tensors.update({NORM: torch.ones(1)})),
        ["model.safetensors", NORM, "(1,)", "(64,)"],
    ),
    "no head, and not tied": (
        lambda f: change_tensors(f, lambda tensors: tensors.pop("lm_head.weight")),
        ["lm_head.weight"],
    ),
    "tied, and another head": (
        lambda f: edit_config(f, {"tie_word_embeddings": True}),
        ["lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings"],
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_13_wrong_checkpoints_are_refused_by_name(what: str, copy: Path) -> None:
    spoil, names = SPOILT[what]
    spoil(copy)
    narrator = Narrator()
    with pytest.raises(WeightsError) as caught:
        make_llm(copy, narrator)
    for name in (str(copy), *names):
        assert name in str(caught.value)
    assert "model_weights_loaded" not in narrator.moments


def test_13_wrong_folders_are_refused_by_name(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ModelConfigError, match=str(folder)):
            make_llm(folder)


@pytest.mark.parametrize("is_head_stored", [True, False])
def test_13_tied_heads_are_right_stored_or_not(is_head_stored: bool, tmp_path: Path) -> None:
    oracle = Oracle.create(tmp_path, {"tie_word_embeddings": True})
    if is_head_stored:
        change_tensors(
            tmp_path,
            lambda tensors: tensors.update(
                {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
            ),
        )
    [prompt] = oracle.prompts([6], 8)
    assert tokens_of(make_llm(tmp_path).generate([prompt], greedy_params(8))) == [
        oracle.greedy(prompt, 8)
    ]


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
    place: str, folder: Path, copy: Path, tmp_path: Path
) -> None:
    [prompt] = Oracle(AutoModelForCausalLM.from_pretrained(folder), folder).prompts([6], 8)
    with_no_end = make_llm(folder).generate([prompt], greedy_params(8, ignore_eos=True))
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


# -- a tokenizer that adds special tokens of its own -----------------------------------------------

BOS = "w2"
TEMPLATE = (
    "{{ bos_token }} w3 {{ messages[0].content }}{% if enable_thinking is false %} w4{% endif %}"
)


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
        def request_enqueue(self, seq: EngineSequence, waiting_len: int) -> None:
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


# -- 14: RoPE and dtype under transformers 5 -------------------------------------------------------

YARN = {"factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("rope_parameters", "older"),
    [
        ({"rope_type": "default", "rope_theta": 300.0}, {"rope_theta": 300.0}),
        (
            {"rope_type": "yarn", "rope_theta": 300.0, **YARN},
            {"rope_theta": 300.0, "rope_scaling": {"type": "yarn", **YARN}},
        ),
    ],
)
@pytest.mark.parametrize("spelling", ["of transformers 5", "older"])
def test_14_rope_is_read_in_both_spellings(
    spelling: str, rope_parameters: dict[str, object], older: dict[str, object], tmp_path: Path
) -> None:
    oracle = Oracle.create(tmp_path, {"rope_parameters": rope_parameters})
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert "rope_theta" not in config, "transformers 5 says it in rope_parameters only"
    if spelling == "older":
        dtypes = {"dtype": None, "torch_dtype": "float32"}
        edit_config(tmp_path, {"rope_parameters": None, **dtypes, **older})
    prompts = oracle.prompts([40, 7], 20)
    assert tokens_of(make_llm(tmp_path).generate(prompts, greedy_params(20))) == [
        oracle.greedy(prompt, 20) for prompt in prompts
    ]


@pytest.mark.parametrize("rope_type", ["dynamic", "llama3", "longrope"])
def test_14_rope_of_another_kind_is_refused_by_name(rope_type: str, copy: Path) -> None:
    edit_config(copy, {"rope_parameters": {"rope_type": rope_type, "rope_theta": 300.0}})
    with pytest.raises(ModelConfigError, match=f"config.json.*{rope_type}"):
        make_llm(copy)


class DtypeKeeper(Observer):
    """Keeps what the engine says of dtypes."""

    def __init__(self) -> None:
        self.dtypes: list[str | None] = []

    def engine_init(self, config: Config, model_config: ModelConfig) -> None:
        """Keep both."""
        self.dtypes = [config.dtype, model_config.dtype]


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_said", [True, False])
def test_14_checkpoints_of_any_dtype_run_in_float32_on_a_cpu(
    stored: torch.dtype, is_said: bool, tmp_path: Path
) -> None:
    name = str(stored).removeprefix("torch.")
    reference: Any = make_reference()
    save_reference(reference.to(stored), tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    oracle = Oracle(reference, tmp_path)
    if not is_said:
        edit_config(tmp_path, {"dtype": None})
    keeper = DtypeKeeper()
    llm = make_llm(tmp_path, keeper)
    assert keeper.dtypes == ["float32", name if is_said else None]
    prompts = oracle.prompts([5, 17], 15)
    assert tokens_of(llm.generate(prompts, greedy_params(15))) == [
        oracle.greedy(prompt, 15) for prompt in prompts
    ]
