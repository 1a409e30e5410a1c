"""PackedWeight: a matrix in the order in which a CPU's matrix product wants to read it.

A product walks over the weight in tiles: as wide as a vector register, as deep as the cache allows.
In a plain matrix a tile's rows lie far apart, so the library copies the tiles together first, in
every call:

        plain      a b c d | e f g h          tiles     a b    c d
                   i j k l | m n o p                    i j    k l    ...  one after the other

For a prompt of a thousand tokens that copy is cheap next to the arithmetic. A decode step has few
tokens: it reads every weight once, multiplies it a few times and is done, and the copy costs
more than the product. Weights do not change, so they are put into tiles once, when loaded.

Knows oneDNN, by way of the operators that torch.compile uses for frozen weights. Where they are not
available (a torch without oneDNN, another device, a 16-bit type) the plain product is used. Tests
compare this one with it. Measured: docs/decisions/0007-pack-weights-on-cpu.md.
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
        """Is there a faster order for this weight, on this machine?"""
        return (
            weight.device.type == "cpu"
            and weight.dtype is torch.float32
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        )
