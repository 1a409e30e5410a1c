"""Models to measure: the shipped one, random ones of a given shape, or a folder.

Speed does not depend on the values of the weights, so random ones can be used to measure it.
"""

from __future__ import annotations

import json
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from nanovllm.assets import TINY_QWEN3
from nanovllm.utils.model_config import ModelConfig
from nvtrace.bench import BenchmarkError
from nvtrace.bench.report import ModelSize

if TYPE_CHECKING:
    from collections.abc import Iterator

SHIPPED = "shipped"
SHAPES: dict[str, dict[str, int]] = {
    "50m": {
        "vocab_size": 36_864,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "0.6b": {  # Qwen3-0.6B's
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
_SAME_FOR_ALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
_STANDARD_DEVIATION = 0.02


@contextmanager
def model_folder(name: str, seed: int) -> Iterator[Path]:
    """The folder of a model; that of a random model is removed at the end.

    Args:
        name: "shipped", a name in SHAPES, or the path of a folder.
        seed: of random weights.

    Raises:
        BenchmarkError: there is no such model.
    """
    if name == SHIPPED:
        yield TINY_QWEN3
    elif name in SHAPES:
        with TemporaryDirectory(prefix="nvtrace-bench-") as folder:
            write_random_model(Path(folder), SHAPES[name], seed)
            yield Path(folder)
    else:
        yield _folder_of(name)


def model_config(name: str) -> ModelConfig:
    """The config of a model, without its weights; names as for `model_folder`.

    Raises:
        BenchmarkError: there is no such model.
        ModelConfigError: the engine cannot run a model with this config.json.
    """
    if name in SHAPES:
        with TemporaryDirectory(prefix="nvtrace-bench-") as folder:
            _write_config(Path(folder), SHAPES[name])
            return ModelConfig.from_folder(folder)
    return ModelConfig.from_folder(TINY_QWEN3 if name == SHIPPED else _folder_of(name))


def _folder_of(name: str) -> Path:
    with suppress(OSError, RuntimeError):  # the name is too long, or ~user does not exist
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder
    raise BenchmarkError(
        f"there is no model {name}: use one of {', '.join([SHIPPED, *SHAPES])}, or the "
        "folder of a Qwen3 model, and there is no such folder"
    )


def write_random_model(folder: Path, shape: dict[str, int], seed: int) -> None:
    """Write config.json and bfloat16 weights, which depend on the seed only. No tokenizer.

    Matrices have a normal distribution of standard deviation 0.02; norms are 1.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, size in _tensor_shapes(shape):
        if len(size) == 1:
            weights[name] = torch.ones(size, dtype=torch.bfloat16)
        else:
            drawn = torch.randn(size, generator=generator) * _STANDARD_DEVIATION
            weights[name] = drawn.to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_config(folder, shape)


def _write_config(folder: Path, shape: dict[str, int]) -> None:
    config = json.dumps(_SAME_FOR_ALL | shape, indent=2)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")


def _tensor_shapes(shape: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of every tensor of a Qwen3 checkpoint."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head_dim = shape["head_dim"]
    q_size = shape["num_attention_heads"] * head_dim
    kv_size = shape["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (shape["vocab_size"], hidden)
    for number in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield f"{layer}.self_attn.q_proj.weight", (q_size, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv_size, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv_size, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, q_size)
        yield f"{layer}.self_attn.q_norm.weight", (head_dim,)
        yield f"{layer}.self_attn.k_norm.weight", (head_dim,)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def model_facts(name: str, config: ModelConfig, dtype: str) -> ModelSize:
    """The number of parameters, and of bytes that a decode step reads.

    Args:
        name: its name in the report.
        config: of the model.
        dtype: that it runs in, for example "bfloat16".
    """
    # A step reads a few rows of the embedding, but the whole head.
    num_unread = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    num_bytes = getattr(torch, dtype).itemsize
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return ModelSize(
        name=name,
        num_parameters=config.num_parameters,
        dtype=dtype,
        weight_bytes=(config.num_parameters - num_unread) * num_bytes,
        kv_bytes_per_token=per_token * num_bytes,
    )
