"""The embedding and the head of the model: token ids in, logits out.

Both are split by vocabulary. Five tokens over two ranks; the last row is padding:

        rank 0   [ token 0 | token 1 | token 2 ]      rank 1   [ token 3 | token 4 | (zeros) ]

The embedding of a token is the sum over the ranks: its row from the rank that has it, zeros from
the others. The logits of all ranks, side by side, are cut off at the end of the vocabulary, so that
no padding can be sampled. Both may have the same matrix ("tied").
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
    """Each token's logit is the product of its row and the hidden state (vLLM: ParallelLMHead).

    Attributes:
        packed: a packed copy of `weight`, which may be the embedding's too; None if not packed.
    """

    packed: PackedWeight | None = None

    def pack(self) -> None:
        """Pack a copy of the loaded weight, if that is faster on this machine."""
        if PackedWeight.pays(self.weight):
            self.packed = PackedWeight(self.weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(num_tokens, hidden_size) -> (num_sampled, vocab_size) float32, on rank 0.

        Only the rows in the context's `logits_indices` are multiplied: of a whole prompt, only the
        last row is sampled from. The other ranks do not sample; they get (0, vocab_size).
        """
        logits_indices = get_context().logits_indices
        if logits_indices is not None:
            hidden_states = hidden_states.index_select(0, logits_indices)
        if self.packed is None:
            logits = functional.linear(hidden_states, self.weight)
        else:
            logits = self.packed(hidden_states)
        return self.parallel.gather(logits.float())[:, : self.partition.whole]
