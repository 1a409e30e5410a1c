"""PackedWeight: a matrix in the order in which a CPU's matrix product reads it.

A product reads the weight in tiles: as wide as a vector register, as deep as the cache allows. In a
plain matrix the rows of a tile are far apart in memory, so oneDNN first copies each tile into
one piece, in every call:

        plain      a b c d | e f g h          tiles     a b    c d
                   i j k l | m n o p                    i j    k l    ...  one after the other

For a prompt of a thousand tokens that copy is cheap compared to the arithmetic. A decode step has
few tokens: the copy costs more than the product. Weights do not change, so they are packed into
tiles once, after loading.

This uses oneDNN, through the operators that torch.compile uses for frozen weights. Where they are
not available (a torch without oneDNN, another device, a 16-bit type) the plain product is used;
the tests compare with it. Measured: docs/decisions/0007-pack-weights-on-cpu.md.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PackedWeight:
    """Calling it multiplies: (num_tokens, in_features) -> (num_tokens, out_features).

    Args:
        weight: (out_features, in_features) float32, on a CPU. It is copied.
    """

    def __init__(self, weight: Tensor) -> None:
        self._tiles: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)  # noqa: SLF001 - torch has no public name for it

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply (num_tokens, in_features) by the weight, transposed."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._tiles, None, "none", [], "")  # noqa: SLF001 - as above
        return product

    @staticmethod
    def pays(weight: Tensor) -> bool:
        """Is a product with this weight faster when it is packed, on this machine?"""
        return (
            weight.device.type == "cpu"
            and weight.dtype is torch.float32
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        )
