"""Log-probabilities of the sampled tokens, and of the most likely ones.

They are those of the model's own distribution, before temperature, top-k and top-p (vLLM V1's
default, "raw_logprobs").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def sampled_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_logprobs: Sequence[int | None]
) -> dict[int, dict[int, float]]:
    """Compute the log-probabilities that the rows request.

    Args:
        logits: (num_rows, vocab_size) float32.
        token_ids: the sampled token of each row.
        num_logprobs: for each row, how many of the most likely tokens, whether or not the sampled
            one is among them; None if the row requests no log-probabilities.

    Returns:
        row -> token id -> log-probability: the sampled token first, then the most likely ones in
        order. Rows that request none are not in it.
    """
    rows = [row for row, number in enumerate(num_logprobs) if number is not None]
    if not rows:
        return {}
    most = max(num_logprobs[row] or 0 for row in rows)
    logprobs = logits[rows].log_softmax(dim=-1)  # (num_asking, vocab_size)
    sampled = torch.tensor([[token_ids[row]] for row in rows], device=logits.device)
    sampled_values = logprobs.gather(1, sampled).squeeze(1).tolist()
    top_values, top_ids = (top.tolist() for top in logprobs.topk(most, dim=-1))
    found = {}
    for row, value, ids, values in zip(rows, sampled_values, top_ids, top_values, strict=True):
        number = num_logprobs[row]
        top_logprobs = dict(zip(ids[:number], values[:number], strict=True))
        found[row] = {token_ids[row]: value} | top_logprobs
    return found
