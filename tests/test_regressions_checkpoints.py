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
from transformers import AutoModelForCausalLM

from nanovllm import Observer
from nanovllm.errors import ModelConfigError, WeightsError
from support.models import edit_config, make_reference, save_reference
from support.oracle import Narrator, Oracle, greedy_params, make_llm, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nanovllm.config import Config
    from nanovllm.models.config import ModelConfig


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
