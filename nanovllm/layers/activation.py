"""SiluAndMul: the gate of the MLP. Its input is gate and up, side by side."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class SiluAndMul(nn.Module):
    """silu(gate) * up."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """(num_tokens, 2 * intermediate_size) -> (num_tokens, intermediate_size)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up
