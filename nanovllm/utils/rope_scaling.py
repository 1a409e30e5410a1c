"""RoPE stretched for texts longer than those a model was trained on: "linear" and "yarn".

Knows the formulas (yarn: https://arxiv.org/abs/2309.00071). Reads no file (`rope_config.py` does).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.utils.rope_config import RopeScaling


def stretch(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Slow the frequencies down as the checkpoint asks.

    Args:
        frequencies: (head_dim / 2,) how far each pair turns from one position to the next, radians.
        theta: what they were made from.
        scaling: the checkpoint's.
    """
    head_dim = 2 * len(frequencies)
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    kept = _yarn_kept_share(head_dim, theta, scaling)
    return frequencies * kept + frequencies / scaling.factor * (1.0 - kept)


def _yarn_kept_share(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Return (head_dim / 2,): 1 where yarn keeps a frequency, 0 where it slows it, or between."""

    def pair_that_turns(num_turns: float) -> float:
        """Which pair turns so often over the original length? Not a whole number, as a rule."""
        wavelength = scaling.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, and no division by zero
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    return 1.0 - ((pairs - low) / (high - low)).clamp(0.0, 1.0)
