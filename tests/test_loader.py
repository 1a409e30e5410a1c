"""The weight loader: what it loads, and that it refuses everything else whole and by name."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.errors import NanoVLLMError, WeightsError
from nanovllm.gpu.attention_choice import make_attention_backend
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.loader import LoadedWeights, check_sizes, find_destinations, load_model
from nanovllm.utils.model_config import ModelConfig
from support.models import edit_config, make_reference, save_reference

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
UP_PROJ = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an untied and a tied checkpoint, to be copied from."""
    root = tmp_path_factory.mktemp("checkpoints")
    save_reference(make_reference(), root / "untied")
    save_reference(make_reference({"tie_word_embeddings": True}), root / "tied")
    return root


@pytest.fixture
def untied(checkpoints: Path, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoints / "untied", tmp_path / "untied")


@pytest.fixture
def tied(checkpoints: Path, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoints / "tied", tmp_path / "tied")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def store(folder: Path, tensors: dict[str, Tensor], name: str = "model.safetensors") -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / name)


def split_into_shards(folder: Path) -> dict[str, str]:
    """Store a checkpoint in two files and an index; return the index's map."""
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number in (1, 2):
        file_name = f"model-0000{number}-of-00002.safetensors"
        names = sorted(tensors)[number - 1 :: 2]
        store(folder, {name: tensors[name] for name in names}, file_name)
        weight_map |= dict.fromkeys(names, file_name)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def empty_model(folder: Path, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """Return a model whose every weight is NaN."""
    model = Qwen3ForCausalLM(ModelConfig.from_folder(folder), make_attention_backend("sdpa"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model.to(dtype)


def assert_holds(model: Qwen3ForCausalLM, tensors: dict[str, Tensor]) -> None:
    """Check every weight of the model against the checkpoint's tensors."""
    dtype = model.lm_head.weight.dtype
    for name, destination in find_destinations(model).items():
        assert torch.equal(destination.weight, tensors[name].to(dtype)), name
    for name, parameter in model.named_parameters():
        assert not parameter.isnan().any(), name


def assert_refuses(folder: Path, *parts: str) -> None:
    """Check that loading fails with one line that has all these parts, and loads nothing."""
    model = empty_model(folder)
    with pytest.raises(WeightsError) as caught:
        load_model(model, folder)
    for part in (str(folder), *parts):
        assert part in str(caught.value)
    assert str(caught.value).count("\n") == 0
    for name, parameter in model.named_parameters():
        assert parameter.isnan().all(), f"{name} was loaded"


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_every_weight_is_written_and_counted(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    tensors = tensors_of(folder)
    model = empty_model(folder)

    loaded = load_model(model, folder)

    assert_holds(model, tensors)
    num_numbers = sum(tensor.numel() for tensor in tensors.values())
    assert loaded == LoadedWeights(num_files=1, num_keys=len(tensors), num_bytes=4 * num_numbers)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_numbers


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_the_frequencies_that_older_checkpoints_hold_are_passed_over(
    kind: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    tensors = tensors_of(folder)
    buffers = {
        f"model.{place}rotary_emb.inv_freq": torch.ones(4, dtype=dtype)
        for place, dtype in (("", torch.float32), ("layers.0.self_attn.", torch.int64))
    }
    store(folder, tensors | buffers)
    check_sizes(folder, ModelConfig.from_folder(folder))
    model = empty_model(folder)
    assert load_model(model, folder).num_keys == len(tensors)
    assert_holds(model, tensors)


def test_packed_modules_stack_the_checkpoints_rows_in_order(untied: Path) -> None:
    tensors = tensors_of(untied)
    model = empty_model(untied)
    load_model(model, str(untied))
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}."
        qkv = [tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
        gate_up = [tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        parameters = dict(layer.named_parameters())
        assert torch.equal(parameters["self_attn.qkv_proj.weight"], torch.cat(qkv))
        assert torch.equal(parameters["mlp.gate_up_proj.weight"], torch.cat(gate_up))


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_of_any_float_type_become_the_models(
    stored: torch.dtype, dtype: torch.dtype, untied: Path
) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in tensors_of(untied).items()}
    store(untied, tensors)
    model = empty_model(untied, dtype)

    loaded = load_model(model, untied)

    assert_holds(model, tensors)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert loaded.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_shards_are_loaded_with_and_without_an_index(untied: Path) -> None:
    tensors = tensors_of(untied)
    split_into_shards(untied)
    for _ in range(2):
        model = empty_model(untied)
        assert load_model(model, untied).num_files == 2
        assert_holds(model, tensors)
        (untied / "model.safetensors.index.json").unlink(missing_ok=True)


def test_a_folder_without_weights_is_refused(untied: Path) -> None:
    (untied / "model.safetensors").unlink()
    assert_refuses(untied, "has no .safetensors file")
    (untied / "pytorch_model.bin").write_bytes(b"weights")
    assert_refuses(untied, "only pytorch_model.bin", "convert")


def test_a_shard_of_the_index_that_is_missing_is_named(untied: Path) -> None:
    split_into_shards(untied)
    (untied / "model-00002-of-00002.safetensors").unlink()
    assert_refuses(untied, "model.safetensors.index.json", "model-00002-of-00002.safetensors")


def test_without_an_index_a_missing_shard_shows_by_its_tensors(untied: Path) -> None:
    weight_map = split_into_shards(untied)
    (untied / "model.safetensors.index.json").unlink()
    (untied / "model-00001-of-00002.safetensors").unlink()
    lost = [name for name, file in weight_map.items() if file.startswith("model-00001")]
    assert_refuses(untied, "lacks", "attn.k_proj.weight", f"and {len(lost) - 4} more")


@pytest.mark.parametrize(
    "weight_map",
    [None, [], {}, {NORM: 1}, {NORM: "../other/model.safetensors"}, {NORM: "/model.safetensors"}],
    ids=["absent", "a list", "empty", "a number", "elsewhere", "absolute"],
)
def test_an_index_that_is_none_is_refused(weight_map: object, untied: Path) -> None:
    split_into_shards(untied)
    write_index(untied, weight_map)
    assert_refuses(untied, "model.safetensors.index.json", "weight_map")


def test_an_index_that_is_no_json_is_refused(untied: Path) -> None:
    split_into_shards(untied)
    (untied / "model.safetensors.index.json").write_text('{"weight_map"', encoding="utf-8")
    assert_refuses(untied, "model.safetensors.index.json is not valid JSON")


def test_an_index_that_names_the_wrong_shard_is_refused(untied: Path) -> None:
    weight_map = split_into_shards(untied)
    others = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    wrong = (others - {weight_map[NORM]}).pop()
    write_index(untied, weight_map | {NORM: wrong})
    assert_refuses(untied, NORM, wrong)


def test_a_tensor_in_two_shards_is_refused(untied: Path) -> None:
    split_into_shards(untied)
    extra = untied / "model-00003-of-00003.safetensors"
    (untied / "model.safetensors.index.json").unlink()
    store(untied, {NORM: torch.ones(64)}, extra.name)
    assert_refuses(untied, NORM, "is in both", extra.name)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        (Q_PROJ, "model.layers.1.self_attn.qkv_proj"),
        (UP_PROJ, "model.layers.0.mlp.gate_up_proj"),
        (NORM, "model.norm"),
        (EMBEDDING, "model.embed_tokens"),
        (HEAD, "lm_head"),
    ],
)
def test_a_missing_tensor_is_named_with_the_module_that_needs_it(
    name: str, module: str, untied: Path
) -> None:
    tensors = tensors_of(untied)
    del tensors[name]
    store(untied, tensors)
    assert_refuses(untied, "lacks", name, f"the model's {module} needs")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "score.weight",
    ],
)
def test_an_unknown_tensor_is_named_with_its_file(name: str, untied: Path) -> None:
    store(untied, tensors_of(untied) | {name: torch.zeros(1)})
    assert_refuses(untied, "model.safetensors", name, "no module")


@pytest.mark.parametrize(
    ("name", "shape", "module"),
    [
        (NORM, (1,), "model.norm"),
        (NORM, (), "model.norm"),
        (NORM, (1, 64), "model.norm"),
        (Q_PROJ, (64, 1), "model.layers.1.self_attn.qkv_proj"),
        (Q_PROJ, (1, 64), "model.layers.1.self_attn.qkv_proj"),
        (UP_PROJ, (64, 96), "model.layers.0.mlp.gate_up_proj"),
        (EMBEDDING, (127, 64), "model.embed_tokens"),
        (HEAD, (128, 63), "lm_head"),
        (HEAD, (0, 64), "lm_head"),
    ],
)
def test_a_wrong_shape_is_refused_also_where_it_would_broadcast(
    name: str, shape: tuple[int, ...], module: str, untied: Path
) -> None:
    store(untied, tensors_of(untied) | {name: torch.ones(shape)})
    assert_refuses(untied, "model.safetensors", name, f"{shape}", f"the model's {module} needs")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_a_type_that_would_need_decoding_is_refused(dtype: torch.dtype, untied: Path) -> None:
    tensors = tensors_of(untied)
    store(untied, tensors | {Q_PROJ: tensors[Q_PROJ].to(dtype)})
    assert_refuses(untied, "model.safetensors", Q_PROJ, "quantized")


@pytest.mark.parametrize("num_bytes", [0, 5, 100, 5000, -1])
def test_a_file_that_is_cut_off_is_named(num_bytes: int, untied: Path) -> None:
    split_into_shards(untied)
    file = untied / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert_refuses(untied, file.name, "not a complete safetensors file")


def test_a_file_that_is_something_else_is_named(untied: Path) -> None:
    file = untied / "model.safetensors"
    file.write_text("<!DOCTYPE html><title>Sign in</title>", encoding="utf-8")
    assert_refuses(untied, file.name, "not a complete safetensors file")
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", encoding="utf-8")
    assert_refuses(untied, file.name, "Git LFS pointer", "git lfs pull")
    file.unlink()
    file.mkdir()
    assert_refuses(untied, file.name, "cannot be read: it is a folder")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [NORM, Q_PROJ, UP_PROJ, EMBEDDING])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(
    name: str, number: float, dtype: torch.dtype, untied: Path
) -> None:
    tensors = tensors_of(untied)
    for place in (0, tensors[name].numel() // 3, -1):
        changed = tensors[name].clone()
        changed.view(-1)[place] = number
        store(untied, tensors | {name: changed})
        with pytest.raises(WeightsError, match=f"{name} holds 1 numbers that are not finite"):
            load_model(empty_model(untied, dtype), untied)


def test_only_one_shard_missing_is_no_matter_of_the_number_of_layers(untied: Path) -> None:
    tensors = tensors_of(untied)
    del tensors[Q_PROJ]
    store(untied, tensors)
    with pytest.raises(WeightsError) as caught:
        load_model(empty_model(untied), untied)
    assert "look at" not in str(caught.value)


def test_a_tied_checkpoint_may_hold_the_head_again(tied: Path) -> None:
    tensors = tensors_of(tied)
    assert HEAD not in tensors
    store(tied, tensors | {HEAD: tensors[EMBEDDING].clone()})
    model = empty_model(tied)

    loaded = load_model(model, tied)

    assert loaded.num_keys == len(tensors) + 1
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_holds(model, tensors)


@pytest.mark.parametrize("change", ["value", "shape", "dtype"])
def test_a_tied_checkpoint_whose_head_differs_is_refused(change: str, tied: Path) -> None:
    tensors = tensors_of(tied)
    head = tensors[EMBEDDING].clone()
    if change == "value":
        head[-1, -1] += 1.0
    store(
        tied,
        tensors
        | {HEAD: {"value": head, "shape": head[:-1], "dtype": head.to(torch.int32)}[change]},
    )
    assert_refuses(tied, HEAD, EMBEDDING, "tie_word_embeddings")


def test_an_untied_model_refuses_a_tied_checkpoint(tied: Path) -> None:
    edit_config(tied, {"tie_word_embeddings": False})
    assert_refuses(tied, "lacks", HEAD, "lm_head")


def test_a_tied_model_refuses_an_untied_checkpoint(untied: Path) -> None:
    edit_config(untied, {"tie_word_embeddings": True})
    assert_refuses(untied, HEAD, EMBEDDING, "differs")


def test_a_checkpoint_of_another_size_is_refused(untied: Path) -> None:
    edit_config(untied, {"head_dim": 8})
    assert_refuses(untied, "config.json")


def test_the_errors_are_value_errors_of_ours() -> None:
    assert issubclass(WeightsError, ValueError)
    assert issubclass(WeightsError, NanoVLLMError)
