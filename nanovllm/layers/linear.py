"""Matrix products, whole or split over the ranks.

A merged layer multiplies once where the checkpoint has several matrices with the same input: one
large product is faster than three small ones. `shards` returns the rows of each matrix, for the
loader to fill.

Split by output (MergedLinear) or by input (RowLinear), each rank holds a part:

           whole weight            rank 0            rank 1
         +-------+-------+       +-------+-------+
         |               |       |               |                    column parallel: each rank
         |               |       +-------+-------+  +-------+-------+  has some of the outputs
         |               |                          |               |
         +-------+-------+                          +-------+-------+

         +-------+-------+       +-------+          +-------+
         |       |       |       |       |          |       |         row parallel: each rank
         |       |       |       |       |          |       |         has some of the inputs, and
         +-------+-------+       +-------+          +-------+         the outputs are summed

(The names are from Megatron-LM, which writes the weight transposed: outputs are its columns.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanovllm.layers.packed_weight import PackedWeight

if TYPE_CHECKING:
    from nanovllm.parallel.tensor_parallel import Partition, TensorParallel


class Linear(nn.Module):
    """output = input @ weight.T, without a bias.

    Attributes:
        weight: (out_features, in_features). Once it is packed it has a shape but no data.
        packed: the same matrix, packed into tiles for a CPU; None if it is not packed.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.packed: PackedWeight | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features)."""
        return functional.linear(x, self.weight) if self.packed is None else self.packed(x)

    def pack(self) -> None:
        """Pack the loaded weight, if that is faster on this machine."""
        if PackedWeight.pays(self.weight):
            self.packed = PackedWeight(self.weight)
            self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)


class RowLinear(Linear):
    """A product whose input is split over the ranks (vLLM: RowParallelLinear).

    Attributes:
        partition: the columns of the whole weight that this rank holds.
    """

    def __init__(self, in_features: int, out_features: int, parallel: TensorParallel) -> None:
        partition = parallel.split(1, in_features)
        super().__init__(partition.size, out_features)
        self.partition = partition
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        """(num_tokens, this rank's in_features) -> (num_tokens, out_features), the same on all."""
        return self.parallel.all_reduce(super().forward(x))


class MergedLinear(Linear):
    """Several matrices with the same input, merged: of each, the rows of this rank.

    vLLM: QKVParallelLinear and MergedColumnParallelLinear.

                     in_features
        weight    +--------------+
                  |    q_proj    |  num_heads * head_dim rows
                  +--------------+
                  |    k_proj    |  num_kv_heads * head_dim rows      (a rank counts its own heads)
                  +--------------+
                  |    v_proj    |  num_kv_heads * head_dim rows
                  +--------------+

    Attributes:
        partitions: the rows of each whole matrix that this rank holds, by its checkpoint name.
    """

    def __init__(self, in_features: int, partitions: dict[str, Partition]) -> None:
        super().__init__(in_features, sum(partition.size for partition in partitions.values()))
        self.partitions = partitions

    def shards(self) -> dict[str, Tensor]:
        """Return the rows of each of the merged matrices, by its name, as views of the weight."""
        sizes = [partition.size for partition in self.partitions.values()]
        return dict(zip(self.partitions, self.weight.split_with_sizes(sizes), strict=True))
