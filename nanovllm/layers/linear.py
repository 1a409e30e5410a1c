"""Matrix products: one plain, two packed.

A packed layer multiplies once where the checkpoint has several matrices that share their input:
one large product is faster than three small ones. It knows which of its rows belong to which
matrix, and gives them out as shards; who fills them is the loader's business.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Linear(nn.Module):
    """output = input @ weight.T, without a bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features)."""
        return functional.linear(x, self.weight)


class PackedLinear(Linear):
    """Several matrices with the same input, stacked by rows.

                     in_features
        weight    +--------------+
                  |    q_proj    |  num_heads * head_dim rows
                  +--------------+
                  |    k_proj    |  num_kv_heads * head_dim rows
                  +--------------+
                  |    v_proj    |  num_kv_heads * head_dim rows
                  +--------------+

    Attributes:
        shard_rows: the rows of each matrix, by the name that it has in a checkpoint.
    """

    def __init__(self, in_features: int, shard_sizes: dict[str, int]) -> None:
        super().__init__(in_features, sum(shard_sizes.values()))
        self.shard_rows: dict[str, slice] = {}
        begin = 0
        for name, size in shard_sizes.items():
            self.shard_rows[name] = slice(begin, begin + size)
            begin += size

    def shard(self, name: str) -> Tensor:
        """Return the rows that hold one of the stacked matrices, as a view of the weight."""
        return self.weight[self.shard_rows[name]]


class QKVLinear(PackedLinear):
    """Queries, keys and values of all heads in one product (vLLM: QKVParallelLinear)."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        shard_sizes = {
            "q_proj": num_heads * head_dim,
            "k_proj": num_kv_heads * head_dim,
            "v_proj": num_kv_heads * head_dim,
        }
        super().__init__(hidden_size, shard_sizes)


class GateUpLinear(PackedLinear):
    """The MLP's gate and up projections in one product (vLLM: MergedColumnParallelLinear)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        shard_sizes = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        super().__init__(hidden_size, shard_sizes)
