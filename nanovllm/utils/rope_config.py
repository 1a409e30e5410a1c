"""The rotary embedding's part of a `config.json`, in both of its spellings.

    transformers 5:  "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, ...}
    before:          "rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, ...}

Knows which parameters each kind of scaling takes, and the formulas by which they change the
frequencies (yarn: https://arxiv.org/abs/2309.00071).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nanovllm.utils.json_fields import LARGEST_COUNT

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.utils.json_fields import JsonFields

# The fields each kind may have; any other is refused, since it would be ignored.
KNOWN_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "attn_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}
FIELDS_OF_ALL = ("rope_type", "type", "rope_theta")
# Of other fields, the value that changes nothing.
IDLE = {"partial_rotary_factor": 1.0, "extrapolation_factor": 1.0}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the rotary frequencies are stretched for texts longer than those trained on.

    Attributes:
        rope_type: `linear` slows every frequency by `factor`. `yarn` slows the low ones, keeps the
            high ones, and ramps between them (https://arxiv.org/abs/2309.00071).
        factor: new length over old length.
        original_max_position_embeddings: yarn: the old length.
        attention_factor: yarn: cosine and sine are multiplied by it.
        beta_fast: yarn: frequencies that turn more often than this over the old length are kept.
        beta_slow: yarn: those that turn less often than this are slowed by the whole factor.
        truncate: yarn: the ramp begins and ends at whole dimensions.
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
        """How far the stretched positions reach, as vLLM's `_get_and_verify_max_len` has it."""
        return int(min(self.original_max_position_embeddings * self.factor, LARGEST_COUNT))

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Slow the frequencies down as the checkpoint asks.

        Args:
            frequencies: (head_dim / 2,) how far each pair turns from one position to the next,
                radians.
            theta: what they were made from.
        """
        if self.rope_type == "linear":
            return frequencies / self.factor
        kept = self._yarn_kept_share(frequencies, theta)
        return frequencies * kept + frequencies / self.factor * (1.0 - kept)

    def _yarn_kept_share(self, frequencies: Tensor, theta: float) -> Tensor:
        """Return (head_dim / 2,): 1 where yarn keeps a frequency, 0 where not, or between."""
        head_dim = 2 * len(frequencies)

        def pair_that_turns(num_turns: float) -> float:
            """Which pair turns so often over the original length? No whole number, as a rule."""
            wavelength = self.original_max_position_embeddings / (num_turns * 2 * math.pi)
            return head_dim * math.log(wavelength) / (2 * math.log(theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # a step instead of a ramp, and no division by zero
        pairs = frequencies.new_tensor(range(len(frequencies)))
        return 1.0 - ((pairs - low) / (high - low)).clamp(0.0, 1.0)


def read_rope(fields: JsonFields, max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """Return rope_theta and the scaling.

    Raises:
        ModelConfigError: a parameter is missing, said twice, or of a kind not implemented.
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
        is_idle = value is None or (name in IDLE and value == IDLE[name])
        what = f"is not implemented for rope_type {rope_type!r}"
        section.require(name, is_known or is_idle, what)
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
    """Return what cosine and sine are multiplied by, from whichever field a checkpoint has.

    `attention_factor` is the whole of it; else it is worked out from `factor`, perhaps by `mscale`
    and `mscale_all_dim` (transformers: `_compute_yarn_parameters`, which passes over one without
    the other). `attn_factor` multiplies that (vLLM: `YaRNScalingRotaryEmbedding`; transformers
    passes over it, but checkpoints that have it were made for the product).
    """

    def scaled(mscale: float = 1.0) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0

    names = ("mscale", "mscale_all_dim")  # 0 is the same as none
    scales = [section.number(n, above=0.0) for n in names if section.get(n) not in (None, 0)]
    found = scaled(scales[0]) / scaled(scales[1]) if len(scales) == len(names) else scaled()
    found *= section.number("attn_factor", above=0.0, default=1.0)
    told = section.number("attention_factor", above=0.0, default=found)
    if section.get("attn_factor") is not None and not math.isclose(told, found, rel_tol=1e-6):
        raise section.error("attn_factor", f"makes {found:g}, but attention_factor is {told:g}")
    return told
