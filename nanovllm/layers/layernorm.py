"""RMSNorm, alone and together with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scale each vector to a root mean square of 1, then by the weight.

    The mean is computed in float32: in 16 bits, squares lose too much precision. The result is
    rounded to the input's dtype before it is multiplied by the weight, as in Qwen3's own code.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size), in the input's dtype."""
        wide = x.float()
        mean_square = wide.square().mean(dim=-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype) * self.weight

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add a layer's output to the residual stream; if there is none yet, `x` becomes it.

        Returns:
            The normed sum, the next layer's input; and the sum, the new residual stream.
        """
        residual = x if residual is None else x + residual
        return self.forward(residual), residual
