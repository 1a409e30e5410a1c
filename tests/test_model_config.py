"""ModelConfig: both spellings of config.json, and every way in which one can be wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from nanovllm.errors import ModelConfigError, NanoVLLMError
from nanovllm.utils.model_config import ModelConfig
from nanovllm.utils.rope_config import RopeScaling
from support.models import edit_config

if TYPE_CHECKING:
    from pathlib import Path

# As Qwen3-0.6B's: the spelling of transformers 4.
OLDER: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# The same in the spelling of transformers 5.
NEWER: dict[str, object] = {
    name: value
    for name, value in OLDER.items()
    if name not in {"rope_theta", "rope_scaling", "torch_dtype"}
} | {
    "dtype": "bfloat16",
    "layer_types": ["full_attention"] * 28,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}


def write(folder: Path, fields: dict[str, object], **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    edit_config(folder, changes)
    return folder


def test_both_spellings_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "older").mkdir()
    (tmp_path / "newer").mkdir()
    older = ModelConfig.from_folder(write(tmp_path / "older", OLDER))
    newer = ModelConfig.from_folder(str(write(tmp_path / "newer", NEWER)))
    assert older == newer
    assert older == ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        attention_bias=False,
        hidden_act="silu",
        dtype="bfloat16",
        eos_token_ids=(151645,),
    )


def test_what_may_be_absent_has_the_usual_value(tmp_path: Path) -> None:
    absent = dict.fromkeys(
        ("head_dim", "tie_word_embeddings", "attention_bias", "hidden_act", "model_type"), None
    )
    folder = write(
        tmp_path, NEWER, **absent, eos_token_id=None, dtype=None, num_key_value_heads=None
    )
    config = ModelConfig.from_folder(folder)
    assert config.head_dim == 1024 // 16
    assert config.num_key_value_heads == 16
    assert config.tie_word_embeddings is False
    assert config.dtype is None
    assert config.eos_token_ids == ()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_has_two_names(name: str, dtype: str, tmp_path: Path) -> None:
    folder = write(tmp_path, NEWER, **{"dtype": None, name: dtype})
    assert ModelConfig.from_folder(folder).dtype == dtype


@pytest.mark.parametrize(
    ("of_config", "of_generation", "expected"),
    [
        (151645, [151645, 151643], (151645, 151643)),
        (151645, 151643, (151645, 151643)),
        ([7, 8], [8, 9], (7, 8, 9)),
        (151645, [], (151645,)),
        (151645, None, (151645,)),
        (None, 151643, (151643,)),
        (None, None, ()),
    ],
)
def test_what_either_file_names_ends_a_text(
    of_config: object, of_generation: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write(tmp_path, NEWER, eos_token_id=of_config)
    generation_file = folder / "generation_config.json"
    generation_file.write_text(json.dumps({"eos_token_id": of_generation}), encoding="utf-8")
    config = ModelConfig.from_folder(folder)
    assert config.eos_token_ids == expected
    assert [*config.eos_by_file] == ["config.json", "generation_config.json"]
    assert {i for ids in config.eos_by_file.values() for i in ids} == {*expected}


def test_an_end_beyond_the_vocabulary_is_refused_by_the_file_that_names_it(tmp_path: Path) -> None:
    folder = write(tmp_path, NEWER)
    generation_file = folder / "generation_config.json"
    generation_file.write_text('{"eos_token_id": 151936}', encoding="utf-8")
    with pytest.raises(ModelConfigError, match=r"generation_config\.json: eos_token_id = 151936"):
        ModelConfig.from_folder(folder)


YARN = {"factor": 4, "original_max_position_embeddings": 32768}
YARN_READ = RopeScaling("yarn", 4.0, 32768, attention_factor=1.1386294361119891)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": {"rope_type": "yarn", **YARN}}, YARN_READ),
        ({"rope_scaling": {"type": "yarn", **YARN}}, YARN_READ),
        ({"rope_scaling": {"type": "yarn", "rope_type": "yarn", **YARN}}, YARN_READ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeScaling("linear", 2.0, 40960)),
        ({"rope_scaling": {"rope_type": "default"}}, None),
        ({"rope_scaling": {}}, None),
        (
            {
                "rope_theta": None,
                "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 1},
            },
            None,
        ),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", **YARN}}, YARN_READ),
    ],
)
def test_scaling_is_read_from_either_place(
    changes: dict[str, object], expected: RopeScaling | None, tmp_path: Path
) -> None:
    config = ModelConfig.from_folder(write(tmp_path, OLDER, **changes))
    assert config.rope_theta == 1e6
    assert config.rope_scaling == expected


@pytest.mark.parametrize(
    ("scaling", "positions", "expected"),
    [
        (None, 80, 80),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 80, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 300, 300),
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 65}, 80, 97),
        ({"rope_type": "yarn", "factor": 2.0}, 80, 160),
        ({"rope_type": "linear", "factor": 2.5}, 80, 200),
        ({"rope_type": "yarn", "factor": 1e308}, 80, 2**63 - 1),
    ],
)
def test_the_positions_reach_as_far_as_their_scaling(
    scaling: dict[str, object] | None, positions: int, expected: int, tmp_path: Path
) -> None:
    changes = {"rope_scaling": scaling, "max_position_embeddings": positions}
    config = ModelConfig.from_folder(write(tmp_path, OLDER, **changes))
    assert config.max_position_embeddings == expected


WRONG: list[tuple[dict[str, object], str]] = [
    ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
    ({"architectures": ["Qwen3MoeForCausalLM"]}, "architectures"),
    ({"architectures": None}, "architectures"),
    ({"model_type": "qwen2"}, "model_type"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"attention_bias": True}, "attention_bias"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, "layer_types"),
    ({"layer_types": ["full_attention"] * 27}, "layer_types"),
    ({"vocab_size": None}, "vocab_size"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"vocab_size": 2**63}, "vocab_size"),
    ({"layer_types": 28}, "layer_types"),
    ({"layer_types": [["full_attention"]] * 28}, "layer_types"),
    ({"hidden_size": -1024}, "hidden_size"),
    ({"hidden_size": "1024"}, "hidden_size"),
    ({"intermediate_size": 3072.5}, "intermediate_size"),
    ({"num_hidden_layers": True}, "num_hidden_layers"),
    ({"num_attention_heads": [16]}, "num_attention_heads"),
    ({"num_key_value_heads": 5}, "num_key_value_heads"),
    ({"num_key_value_heads": 32}, "num_key_value_heads"),
    ({"head_dim": 127}, "head_dim"),
    ({"head_dim": None, "num_attention_heads": 24}, "head_dim"),
    ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ({"max_position_embeddings": 1}, "max_position_embeddings"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"tie_word_embeddings": "true"}, "tie_word_embeddings"),
    ({"torch_dtype": "int8"}, "torch_dtype"),
    ({"dtype": ["bfloat16"]}, "dtype"),
    ({"eos_token_id": -1}, "eos_token_id"),
    ({"eos_token_id": [1, "2"]}, "eos_token_id"),
    ({"eos_token_id": True}, "eos_token_id"),
    ({"rope_theta": None}, "rope_theta"),
    ({"rope_theta": 0}, "rope_theta"),
    ({"rope_theta": float("inf")}, "rope_theta"),
    ({"rope_theta": 10**400}, "rope_theta"),
    ({"rope_parameters": {"rope_theta": 10000.0}}, "rope_theta"),
    ({"rope_parameters": [1e6]}, "rope_parameters"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
    ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.rope_type"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_scaling.rope_type"),
    ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2}}, "rope_scaling.type"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling.factor"),
    ({"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": -0.7}}, "rope_scaling.mscale"),
    ({"rope_scaling": {"rope_type": "yarn", **YARN, "attn_factor": 0}}, "rope_scaling.attn_factor"),
    (
        {"rope_scaling": {"rope_type": "yarn", **YARN, "attn_factor": 1, "attention_factor": 1.0}},
        "rope_scaling.attn_factor",
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", **YARN, "extrapolation_factor": 0.5}},
        "rope_scaling.extrapolation_factor",
    ),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2, "mscale": 1}}, "rope_scaling.mscale"),
    ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "rope_scaling.factor"),
    ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor"),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        "rope_parameters.full_attention",
    ),
    (
        {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN},
            "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
        },
        "rope_scaling",
    ),
    ({"original_max_position_embeddings": 4096}, "original_max_position_embeddings"),
]


@pytest.mark.parametrize(("changes", "field"), WRONG, ids=lambda part: str(part)[:60])
def test_a_wrong_field_is_refused_with_file_and_field(
    changes: dict[str, object], field: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, OLDER, **changes)
    with pytest.raises(ModelConfigError) as caught:
        ModelConfig.from_folder(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'config.json'}: {field} ")
    assert message.count("\n") == 0


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="nowhere does not exist"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelConfigError, match=r"has no config\.json"):
        ModelConfig.from_folder(tmp_path)
    write(tmp_path, NEWER)
    with pytest.raises(ModelConfigError, match=r"config\.json is a file"):
        ModelConfig.from_folder(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is not valid JSON"),
        (b'{"vocab_size": 12', "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"vocab_size": ' + b"1" * 5000 + b"}", "is not valid JSON"),
        (b"[1, 2]", "must hold a JSON object, not list"),
        (b"null", "must hold a JSON object, not NoneType"),
    ],
    ids=["empty", "cut off", "no text", "nested", "too long a number", "a list", "null"],
)
def test_a_file_that_is_no_json_object_is_refused(
    content: bytes, complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelConfigError, match=rf"config\.json {complaint}"):
        ModelConfig.from_folder(tmp_path)


def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelConfigError, match=r"config\.json cannot be read"):
        ModelConfig.from_folder(tmp_path)


def test_the_errors_are_value_errors_of_ours() -> None:
    assert issubclass(ModelConfigError, ValueError)
    assert issubclass(ModelConfigError, NanoVLLMError)
