"""ModelConfig: the `config.json` of a model folder, read and checked.

Both spellings of the file are read (transformers 5, and before). A field that would change the
model's output is either read or refused by name, never ignored. Wrong shapes of weights are found
by the loader.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.errors import ModelConfigError
from nanovllm.utils.files import explain, is_there, read_json
from nanovllm.utils.json_fields import JsonFields
from nanovllm.utils.rope_config import RopeScaling, read_rope

if TYPE_CHECKING:
    import os
    from typing import Self

ARCHITECTURE = "Qwen3ForCausalLM"
DTYPES = ("float32", "float16", "bfloat16")
SIZE_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
GIB = 1024**3

# Fields of which only one value is implemented. Absent or null means that value.
IMPLEMENTED_ONLY: tuple[tuple[str, object], ...] = (
    ("model_type", "qwen3"),
    ("hidden_act", "silu"),
    ("attention_bias", False),
    ("use_sliding_window", False),
    ("quantization_config", None),
    ("partial_rotary_factor", 1.0),
    ("original_max_position_embeddings", None),
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Qwen3 model.

    Attributes:
        architecture: the class named in `architectures`.
        head_dim: width of one attention head; not always hidden_size / num_attention_heads.
        rope_scaling: how the rotary frequencies are stretched, None if they are not.
        max_position_embeddings: positions go from 0 to this number, exclusive: the file's value, or
            that of rope_scaling if it is larger.
        tie_word_embeddings: the head uses the matrix of the embedding.
        dtype: the checkpoint's dtype (float32, float16 or bfloat16), None if not given.
        eos_token_ids: each ends a sequence; from config.json and generation_config.json.
        eos_by_file: the same ids, by file name.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    hidden_act: str
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    eos_by_file: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False)

    @property
    def num_parameters(self) -> int:
        """The number of parameters; a tied head counts once."""
        num_q_rows = self.num_attention_heads * self.head_dim
        num_kv_rows = self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * 2 * (num_q_rows + num_kv_rows)  # q, o; k, v
        mlp = self.hidden_size * 3 * self.intermediate_size  # gate, up, down
        norms = 2 * self.hidden_size + 2 * self.head_dim
        num_embeddings = 1 if self.tie_word_embeddings else 2
        embeddings = num_embeddings * self.vocab_size * self.hidden_size
        return embeddings + self.num_hidden_layers * (attention + mlp + norms) + self.hidden_size

    def check_memory(
        self, folder: str, total_bytes: int, bytes_per_parameter: int, num_positions: int
    ) -> None:
        """Check that the model fits into the memory, before anything is allocated.

        Args:
            folder: of the config, for the error.
            total_bytes: of the memory; with several ranks, of all together.
            bytes_per_parameter: of the dtype that the weights are loaded as.
            num_positions: rows of the rotary table, which is float32.

        Raises:
            ModelConfigError: it does not; the message has the numbers and the fields.
        """
        weight_bytes = self.num_parameters * bytes_per_parameter
        table_bytes = num_positions * self.head_dim * 4
        if weight_bytes + table_bytes <= total_bytes:
            return
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in SIZE_FIELDS)
        raise ModelConfigError(
            f"{folder}/config.json describes a model that does not fit into memory: "
            f"{self.num_parameters} parameters of {bytes_per_parameter} bytes "
            f"({weight_bytes / GIB:.4g} GiB) and a table of {num_positions} positions "
            f"({table_bytes / GIB:.4g} GiB), but the memory has {total_bytes / GIB:.4g} GiB; "
            f"if {sizes} are right, take a smaller model, dtype or max_model_len."
        )

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> Self:
        """Read `config.json` and, if there is one, `generation_config.json` of a model folder.

        Raises:
            ModelConfigError: the message names the file, the field and what is wrong with it.
        """
        folder = Path(path)
        _check_folder(folder)
        fields = _read_json(folder / "config.json")
        _check_what_is_implemented(fields)

        hidden_size = fields.count("hidden_size")
        num_hidden_layers = fields.count("num_hidden_layers")
        num_attention_heads = fields.count("num_attention_heads")
        max_position_embeddings = fields.count("max_position_embeddings")
        is_enough = max_position_embeddings > 1
        fields.require(
            "max_position_embeddings", is_enough, "must be at least 2: a prompt and one more"
        )
        vocab_size = fields.count("vocab_size")
        _check_layer_types(fields, num_hidden_layers)
        rope_theta, rope_scaling = read_rope(fields, max_position_embeddings)
        if rope_scaling is not None:
            max_position_embeddings = max(max_position_embeddings, rope_scaling.num_positions)
        eos_by_file = {
            source.file.name: source.token_ids("eos_token_id", vocab_size)
            for source in (fields, _read_json(folder / "generation_config.json", optional=True))
        }
        return cls(
            architecture=ARCHITECTURE,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size"),
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=_num_key_value_heads(fields, num_attention_heads),
            head_dim=_head_dim(fields, hidden_size, num_attention_heads),
            rms_norm_eps=fields.number("rms_norm_eps", above=0.0),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
            attention_bias=False,
            hidden_act="silu",
            dtype=_dtype(fields),
            eos_token_ids=tuple(dict.fromkeys(chain(*eos_by_file.values()))),
            eos_by_file=eos_by_file,
        )


def _check_folder(folder: Path) -> None:
    try:
        what = None if stat.S_ISDIR(folder.stat().st_mode) else "is a file"
    except (OSError, ValueError) as error:
        what = f"cannot be opened: {explain(error, folder)}"
        if isinstance(error, FileNotFoundError) and not is_there(folder):
            what = "does not exist"
    if what is not None:
        raise ModelConfigError(
            f"{folder} {what}; give the folder of a model, with config.json in it."
        )


def _read_json(file: Path, *, optional: bool = False) -> JsonFields:
    if not is_there(file):
        if optional:
            return JsonFields(file, {})
        raise ModelConfigError(f"{file.parent} has no {file.name}; is it a model folder?")
    content = read_json(file, ModelConfigError)
    if not isinstance(content, dict):
        raise ModelConfigError(f"{file} must hold a JSON object, not {type(content).__name__}.")
    return JsonFields(file, content)


def _check_what_is_implemented(fields: JsonFields) -> None:
    is_qwen3 = fields.get("architectures") == [ARCHITECTURE]
    what = f"must be [{ARCHITECTURE!r}]; no other model is implemented"
    fields.require("architectures", is_qwen3, what)
    for name, only in IMPLEMENTED_ONLY:
        what = f"is not implemented; only {only!r} is"
        fields.require(name, fields.get(name) in (None, only), what)


def _check_layer_types(fields: JsonFields, num_hidden_layers: int) -> None:
    layer_types = fields.get("layer_types")
    kinds = layer_types if isinstance(layer_types, list) else []
    is_full = len(kinds) == num_hidden_layers and all(kind == "full_attention" for kind in kinds)
    what = (
        f"must name 'full_attention' {num_hidden_layers} times (num_hidden_layers);"
        " no other kind is implemented"
    )
    fields.require("layer_types", layer_types is None or is_full, what)


def _num_key_value_heads(fields: JsonFields, num_heads: int) -> int:
    """Each key/value head is shared by the same number of query heads (GQA)."""
    num_kv_heads = fields.count("num_key_value_heads", default=num_heads)
    what = f"must divide num_attention_heads = {num_heads}"
    fields.require("num_key_value_heads", num_heads % num_kv_heads == 0, what)
    return num_kv_heads


def _head_dim(fields: JsonFields, hidden_size: int, num_heads: int) -> int:
    is_known = fields.get("head_dim") is not None or hidden_size % num_heads == 0
    what = (
        f"must be given where num_attention_heads = {num_heads}"
        f" does not divide hidden_size = {hidden_size}"
    )
    fields.require("head_dim", is_known, what)
    head_dim = fields.count("head_dim", default=hidden_size // num_heads)
    what = f"must be even, because RoPE rotates pairs of numbers; it is {head_dim}"
    fields.require("head_dim", head_dim % 2 == 0, what)
    return head_dim


def _dtype(fields: JsonFields) -> str | None:
    """`dtype` since transformers 5, `torch_dtype` before."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype = fields.get(name)
    fields.require(name, dtype in (None, *DTYPES), f"must be one of {', '.join(DTYPES)}")
    return dtype if isinstance(dtype, str) else None
