"""The two ends of the model: token ids in, logits out.

Both are split by vocabulary. Five tokens over two ranks, the last row padding:

        rank 0   [ token 0 | token 1 | token 2 ]      rank 1   [ token 3 | token 4 | (zeros) ]

The embedding of a token is that of the rank that has it, plus zeros from all others. The logits of
all ranks, side by side, are cut off where the vocabulary ends, so that no padding can be sampled.

Knows that the two may be one matrix. Does not know how a token is chosen from the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanovllm.layers.context import get_context
from nanovllm.layers.packed_weight import PackedWeight
from nanovllm.parallel.tensor_parallel import ALONE, TensorParallel


class VocabEmbedding(nn.Module):
    """One row of the weight for each token of the vocabulary (vLLM: VocabParallelEmbedding).

    Attributes:
        partition: the rows of the whole weight that this rank holds.
    """

    def __init__(self, vocab_size: int, hidden_size: int, parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self.parallel = parallel
        self.partition = parallel.split(0, vocab_size)
        rows = torch.empty(self.partition.size, hidden_size)
        rows[self.partition.num_stored :] = 0.0  # padding, which is not in the checkpoint
        self.weight = nn.Parameter(rows, requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(num_tokens,) -> (num_tokens, hidden_size), the same on all ranks."""
        if self.parallel.world_size == 1:
            return functional.embedding(input_ids, self.weight)
        rows = input_ids - self.partition.begin
        is_elsewhere = (rows < 0) | (rows >= self.partition.size)
        embedded = functional.embedding(rows.masked_fill(is_elsewhere, 0), self.weight)
        return self.parallel.all_reduce(embedded.masked_fill(is_elsewhere.unsqueeze(1), 0.0))


class LMHead(VocabEmbedding):
    """Each token's logit is its row's product with the hidden state (vLLM: ParallelLMHead).

    Attributes:
        packed: the weight in a faster order, beside `weight`, which may be the embedding's own;
            None before `pack`.
    """

    packed: PackedWeight | None = None

    def pack(self) -> None:
        """Reorder a copy of the weight, once it is loaded, if that makes products faster here."""
        if PackedWeight.pays(self.weight):
            self.packed = PackedWeight(self.weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(num_tokens, hidden_size) -> (num_sampled, vocab_size) float32, on rank 0.

        Only the rows in the context's `logits_indices` are multiplied: of a prompt of a thousand
        tokens, one row is sampled from. The other ranks get (0, vocab_size): they do not sample.
        """
        logits_indices = get_context().logits_indices
        if logits_indices is not None:
            hidden_states = hidden_states.index_select(0, logits_indices)
        if self.packed is None:
            logits = functional.linear(hidden_states, self.weight)
        else:
            logits = self.packed(hidden_states)
        return self.parallel.gather(logits.float())[:, : self.partition.whole]
