"""The rotary embedding's part of a `config.json`, in both of its spellings.

    transformers 5:  "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, ...}
    before:          "rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, ...}

(yarn: https://arxiv.org/abs/2309.00071)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nanovllm.utils.json_fields import LARGEST_COUNT

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.utils.json_fields import JsonFields

# The fields that each kind may have; any other is refused, because it would be ignored.
KNOWN_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "attn_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}
FIELDS_OF_ALL = ("rope_type", "type", "rope_theta")
# Other fields, each with the value that changes nothing.
NO_EFFECT = {"partial_rotary_factor": 1.0, "extrapolation_factor": 1.0}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the rotary frequencies are scaled for texts longer than those in training.

    Attributes:
        rope_type: `linear` divides every frequency by `factor`. `yarn` divides the low ones, keeps
            the high ones, and interpolates between them (https://arxiv.org/abs/2309.00071).
        factor: new length / original length.
        original_max_position_embeddings: yarn: the original length.
        attention_factor: yarn: cosine and sine are multiplied by it.
        beta_fast: yarn: frequencies with more turns than this over the original length are kept.
        beta_slow: yarn: frequencies with fewer turns than this are divided by `factor`.
        truncate: yarn: the interpolation begins and ends at whole dimensions.
    """

    rope_type: Literal["linear", "yarn"]
    factor: float
    original_max_position_embeddings: int
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def num_positions(self) -> int:
        """The number of positions with scaling, as in vLLM's `_get_and_verify_max_len`."""
        return int(min(self.original_max_position_embeddings * self.factor, LARGEST_COUNT))

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Scale the frequencies.

        Args:
            frequencies: (head_dim / 2,) the rotation of each pair per position, in radians.
            theta: rope_theta, which they were computed from.
        """
        if self.rope_type == "linear":
            return frequencies / self.factor
        kept = self._yarn_kept_share(frequencies, theta)
        return frequencies * kept + frequencies / self.factor * (1.0 - kept)

    def _yarn_kept_share(self, frequencies: Tensor, theta: float) -> Tensor:
        """Return (head_dim / 2,): 1 where yarn keeps a frequency, 0 where not, or between."""
        head_dim = 2 * len(frequencies)

        def pair_that_turns(num_turns: float) -> float:
            """The index, a float, of the pair that turns so often over the original length."""
            wavelength = self.original_max_position_embeddings / (num_turns * 2 * math.pi)
            return head_dim * math.log(wavelength) / (2 * math.log(theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # avoids a division by zero
        pairs = frequencies.new_tensor(range(len(frequencies)))
        return 1.0 - ((pairs - low) / (high - low)).clamp(0.0, 1.0)


def read_rope(fields: JsonFields, max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """Return rope_theta and the scaling.

    Raises:
        ModelConfigError: a parameter is missing, given twice, or not implemented.
    """
    sections = [*filter(None, map(fields.section, ("rope_parameters", "rope_scaling")))]
    scalings = [_read_scaling(section, max_position_embeddings) for section in sections]
    places = [place for place in (*sections, fields) if place.get("rope_theta") is not None]
    fields.require("rope_theta", places, "must be given, here or in rope_parameters")
    thetas = [place.number("rope_theta", above=1.0) for place in places]
    fields.require("rope_theta", len(set(thetas)) == 1, f"is given twice and differs: {thetas}")
    is_one = len(set(scalings)) <= 1
    fields.require("rope_scaling", is_one, "contradicts rope_parameters; keep one of the two")
    return thetas[0], scalings[0] if scalings else None


def _read_scaling(section: JsonFields, max_position_embeddings: int) -> RopeScaling | None:
    named = [name for name in ("rope_type", "type") if section.get(name) is not None]
    rope_type = section.get(named[0]) if named else "default"
    is_one = all(section.get(name) == rope_type for name in named)
    section.require("type", is_one, f"contradicts rope_type = {rope_type!r}")
    if not isinstance(rope_type, str) or rope_type not in KNOWN_FIELDS:
        raise section.error(named[0], f"is not implemented; {', '.join(KNOWN_FIELDS)} are")
    for name, value in section.values.items():
        is_known = name in FIELDS_OF_ALL + KNOWN_FIELDS[rope_type]
        has_no_effect = value is None or (name in NO_EFFECT and value == NO_EFFECT[name])
        what = f"is not implemented for rope_type {rope_type!r}"
        section.require(name, is_known or has_no_effect, what)
    if rope_type == "default":
        return None
    factor = section.number("factor", above=0.0)
    section.require("factor", factor >= 1.0, "must be at least 1")
    original = section.count("original_max_position_embeddings", default=max_position_embeddings)
    if rope_type == "linear":
        return RopeScaling("linear", factor, original)
    return RopeScaling(
        "yarn",
        factor,
        original,
        attention_factor=_attention_factor(section, factor),
        beta_fast=section.number("beta_fast", above=0.0, default=32.0),
        beta_slow=section.number("beta_slow", above=0.0, default=1.0),
        truncate=section.flag("truncate", default=True),
    )


def _attention_factor(section: JsonFields, factor: float) -> float:
    """Return the factor of cosine and sine, from the fields that the checkpoint has.

    `attention_factor` is used as it is. Without it, the factor is computed from `factor`, and from
    `mscale` and `mscale_all_dim` if both are given (transformers: `_compute_yarn_parameters`). It
    is multiplied by `attn_factor` (vLLM: `YaRNScalingRotaryEmbedding`; transformers ignores it, but
    checkpoints that have it need it).
    """

    def scaled(mscale: float = 1.0) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0

    names = ("mscale", "mscale_all_dim")  # 0 is the same as none
    scales = [section.number(n, above=0.0) for n in names if section.get(n) not in (None, 0)]
    found = scaled(scales[0]) / scaled(scales[1]) if len(scales) == len(names) else scaled()
    found *= section.number("attn_factor", above=0.0, default=1.0)
    given = section.number("attention_factor", above=0.0, default=found)
    if section.get("attn_factor") is not None and not math.isclose(given, found, rel_tol=1e-6):
        raise section.error("attn_factor", f"makes {found:g}, but attention_factor is {given:g}")
    return given
