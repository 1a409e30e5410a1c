"""The two ends of the model: token ids in, logits out.

Knows that the two may be one matrix. Does not know how a token is chosen from the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanovllm.utils.context import get_context


class VocabEmbedding(nn.Module):
    """One row of the weight for each token of the vocabulary."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(num_tokens,) -> (num_tokens, hidden_size)."""
        return functional.embedding(input_ids, self.weight)


class LMHead(VocabEmbedding):
    """Each token's logit is its row's product with the hidden state."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(num_tokens, hidden_size) -> (num_sampled, vocab_size) float32.

        Only the rows in the context's `logits_indices` are multiplied: of a prompt of a thousand
        tokens, one row is sampled from.
        """
        logits_indices = get_context().logits_indices
        if logits_indices is not None:
            hidden_states = hidden_states.index_select(0, logits_indices)
        return functional.linear(hidden_states, self.weight).float()
