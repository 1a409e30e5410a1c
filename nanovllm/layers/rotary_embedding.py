"""RotaryEmbedding: rotates queries and keys by an angle that depends on the token's position.

The numbers of a head are taken in pairs (i, i + head_dim / 2), and pair i of the token at
position p is rotated by p * frequency[i]:

        [ x_0 ... x_i ... | x_h ... x_(i+h) ... ]       h = head_dim / 2
              '----------------'
          x_i'     =  x_i cos - x_(i+h) sin
          x_(i+h)' =  x_(i+h) cos + x_i sin

The product of a query and a key then depends on the distance of their positions only.

This is RoPE as Qwen3 uses it. The scaling for long texts is in `utils/rope_config.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from nanovllm.utils.rope_config import RopeScaling


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of a step's tokens. It is the same in every layer, so it is computed once.

    Attributes:
        cos: (num_tokens, 1, head_dim) float32, the cosines, twice.
        sin: (num_tokens, 1, head_dim) float32, the sines, negated in the first half.
    """

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotate (num_tokens, num_heads, head_dim), in float32; return the input's dtype."""
        wide = x.float()
        partner = wide.roll(wide.shape[-1] // 2, dims=-1)  # the two halves swapped
        return torch.addcmul(wide * self.cos, partner, self.sin).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """The table of cosines and sines of every position from 0 to `num_positions`, exclusive.

    The row of a position does not depend on `num_positions`.

    The table is float32 in a model of any dtype: with the 8 significant bits of bfloat16,
    neighbouring positions would often have the same angle. It stays on the device that it was
    created on.

    Attributes:
        cos_sin_table: (num_positions, head_dim): cosines, then sines, of each frequency, times
            the scaling's attention factor.
    """

    def __init__(
        self, head_dim: int, num_positions: int, theta: float, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / theta**exponents  # (head_dim / 2,): from 1 down to nearly 1 / theta
        if scaling is not None:
            frequencies = scaling.stretch(frequencies, theta)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
        factor = 1.0 if scaling is None else scaling.attention_factor
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * factor
        self.cos_sin_table = table  # not a buffer: `model.to(dtype)` would round it

    def forward(self, positions: Tensor) -> Rotation:
        """(num_tokens,) int64 -> the rotation of those tokens."""
        cos, sin = self.cos_sin_table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
