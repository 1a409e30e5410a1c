"""The rotary embedding, against transformers' own, in each kind of scaling."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.json_fields import JsonFields
from nanovllm.utils.rope_config import read_rope

if TYPE_CHECKING:
    from pathlib import Path

MAX_POSITION = 2048
HEAD_DIM = 64
KINDS: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "large theta": {"rope_type": "default", "rope_theta": 1000000},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 3.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn without the original length": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2},
    "yarn, everything said": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 0.75,
        "beta_fast": 16,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn, two mscales": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.5,
        "mscale_all_dim": 1.0,
    },
    "yarn, a ramp of no width": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 6,
    },
}


def make_rotary(kind: str, tmp_path: Path, num_positions: int = MAX_POSITION) -> RotaryEmbedding:
    fields = JsonFields(tmp_path / "config.json", {"rope_parameters": KINDS[kind]})
    theta, scaling = read_rope(fields, MAX_POSITION)
    return RotaryEmbedding(HEAD_DIM, num_positions, theta, scaling)


def make_reference(kind: str) -> Qwen3RotaryEmbedding:
    config = Qwen3Config(
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        rope_parameters=json.loads(json.dumps(KINDS[kind])),
    )
    return Qwen3RotaryEmbedding(config)


@pytest.mark.parametrize("kind", KINDS)
def test_queries_and_keys_are_turned_as_transformers_turns_them(kind: str, tmp_path: Path) -> None:
    positions = torch.tensor([0, 1, 2, 17, 300, MAX_POSITION - 1])
    heads = torch.randn(6, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    cos, sin = make_reference(kind)(heads, positions.unsqueeze(0))
    expected, _ = apply_rotary_pos_emb(heads, heads, cos[0], sin[0])

    turned = make_rotary(kind, tmp_path)(positions).apply(heads)

    torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-5)


DISTILLED = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
OF_FACTOR = 0.1 * math.log(4.0) + 1.0


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, OF_FACTOR),
        ({"attention_factor": 0.9}, 0.9),
        ({"attention_factor": 0.9, "mscale": 0.5, "mscale_all_dim": 1.0}, 0.9),
        ({"mscale": 0.7}, OF_FACTOR),
        ({"mscale": 0.7, "mscale_all_dim": 0}, OF_FACTOR),
        ({"mscale_all_dim": 0.7}, OF_FACTOR),
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, 1.0),
        ({"mscale": 1.5, "mscale_all_dim": 1.0}, (0.15 * math.log(4.0) + 1.0) / OF_FACTOR),
    ],
)
def test_yarns_attention_factor_is_that_of_transformers(
    said: dict[str, object], expected: float, tmp_path: Path
) -> None:
    """Of `_compute_yarn_parameters`, which knows neither `attn_factor` nor one mscale alone."""
    config = Qwen3Config(head_dim=HEAD_DIM, rope_parameters=DISTILLED | said)
    factor = ROPE_INIT_FUNCTIONS["yarn"](config)[1]
    assert factor == pytest.approx(expected, rel=1e-12)
    assert attention_factor(DISTILLED | said, tmp_path) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        # A distilled Qwen3-8B: its attn_factor undoes what the factor does.
        ({"attn_factor": 0.8782488562869419}, 1.0),
        ({"attn_factor": 1.0}, OF_FACTOR),
        ({"attn_factor": 2, "mscale": 0.7, "mscale_all_dim": 0.7}, 2.0),
        ({"attn_factor": 0.5, "attention_factor": OF_FACTOR / 2}, OF_FACTOR / 2),
    ],
)
def test_yarns_attn_factor_multiplies_as_vllm_does(
    said: dict[str, object], expected: float, tmp_path: Path
) -> None:
    """Of `YaRNScalingRotaryEmbedding`: mscale = yarn_get_mscale(factor) * attn_factor."""
    assert attention_factor(DISTILLED | said, tmp_path) == pytest.approx(expected, rel=1e-12)


def attention_factor(section: dict[str, object], tmp_path: Path) -> float:
    scaling = read_rope(JsonFields(tmp_path / "config.json", {"rope_parameters": section}), 131072)[
        1
    ]
    assert scaling is not None
    return scaling.attention_factor


def test_the_kinds_of_scaling_differ_from_the_default(tmp_path: Path) -> None:
    tables = [make_rotary(kind, tmp_path).cos_sin_table for kind in KINDS]
    for index, table in enumerate(tables):
        for other in tables[index + 1 :]:
            assert not torch.allclose(table, other, atol=1e-2)


def test_the_product_of_query_and_key_depends_on_their_distance_only(tmp_path: Path) -> None:
    rotary = make_rotary("default", tmp_path)
    q, k = torch.randn(2, 1, 1, HEAD_DIM, generator=torch.Generator().manual_seed(1))

    def product(q_position: int, k_position: int) -> torch.Tensor:
        turned_q = rotary(torch.tensor([q_position])).apply(q)
        turned_k = rotary(torch.tensor([k_position])).apply(k)
        return torch.sum(turned_q * turned_k)

    torch.testing.assert_close(product(9, 4), product(1009, 1004), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(product(9, 4), product(9, 5), atol=1e-3)


def test_converting_the_model_does_not_round_the_angles(tmp_path: Path) -> None:
    rotary = make_rotary("default", tmp_path)
    exact = rotary.cos_sin_table.clone()

    rotary.to(torch.bfloat16)

    assert torch.equal(rotary.cos_sin_table, exact)
    heads = torch.ones(1, 1, HEAD_DIM, dtype=torch.bfloat16)
    assert rotary(torch.tensor([2001])).apply(heads).dtype == torch.bfloat16


def test_the_table_is_made_where_the_model_is(tmp_path: Path) -> None:
    with torch.device("meta"):
        rotary = make_rotary("default", tmp_path)
    assert rotary.cos_sin_table.device.type == "meta"
    assert rotary.cos_sin_table.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_table_is_the_beginning_of_a_long_one(kind: str, tmp_path: Path) -> None:
    long, short = (make_rotary(kind, tmp_path, number) for number in (MAX_POSITION, 100))
    assert torch.equal(short.cos_sin_table, long.cos_sin_table[:100])


def test_a_position_past_the_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        make_rotary("default", tmp_path)(torch.tensor([MAX_POSITION]))
