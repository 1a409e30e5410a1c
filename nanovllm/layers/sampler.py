"""Sampler: from a row of logits to one token.

A token is sampled by the Gumbel-max trick: add Gumbel noise to every logit and take the largest.
The noise is **stateless**: the number added for token `i` depends only on the request's seed, the
position in the sequence and `i`. There is no random generator with a state, so a token gets the
same noise in any batch, with any chunks of its prompt, and after a preemption. (The logits may
differ in their last bits when the batch has another shape.)

        seed, position ──splitmix64──> key, 64 bits      in Python, once per row
        key, i ──two rounds of a 32-bit hash──> x        in torch, for each token i
        u = (x + 0.5) / 2**32                            uniform in (0, 1)
        noise = -log(-log(u))                            Gumbel
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nanovllm.errors import LogitsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanovllm.sampling_params import SamplingParams

BITS_32 = 2**32 - 1
BITS_64 = 2**64 - 1
FLOAT32 = torch.finfo(torch.float32)


class SamplingTensors:
    """How each row of a step is sampled, on the model's device.

    Args:
        params: the sampling params of each row's request.
        seeds: any whole numbers; their lowest 64 bits are used.
        positions: of the tokens to be sampled, in their sequences.
        device: where the logits will be.

    Attributes:
        temperatures: (num_rows,) float32, 0 for greedy.
        noise_keys: (2, num_rows) int64, the lower and upper 32 bits of each row's key.
        is_greedy: (num_rows,) bool.
        is_all_greedy: is every row greedy?
        filtered_rows: (num_filtered,) int64, the rows with top-k or top-p; None if there is none.
        top_ks: (num_filtered,) int64 of these rows, a huge number where off.
        top_ps: (num_filtered,) float32 of these rows, infinity where off.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        keys = [_noise_key(seed, p) for seed, p in zip(seeds, positions, strict=True)]
        halves = [[key & BITS_32 for key in keys], [key >> 32 for key in keys]]
        self.noise_keys = torch.tensor(halves, dtype=torch.int64, device=device)
        temperatures = [p.temperature for p in params]
        self.temperatures = torch.tensor(temperatures, dtype=torch.float32, device=device)
        is_greedy = [temperature == 0.0 for temperature in temperatures]
        self.is_greedy = torch.tensor(is_greedy, device=device)
        self.is_all_greedy = all(is_greedy)
        rows = [row for row, p in enumerate(params) if p.is_filtered]
        self.filtered_rows = torch.tensor(rows, device=device) if rows else None
        top_ks = [params[row].top_k or BITS_32 for row in rows]
        self.top_ks = torch.tensor(top_ks, dtype=torch.int64, device=device)
        top_ps = [params[row].top_p if params[row].top_p < 1.0 else torch.inf for row in rows]
        self.top_ps = torch.tensor(top_ps, dtype=torch.float32, device=device)


class Sampler(nn.Module):
    """Chooses one token a row."""

    def forward(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """(num_rows, vocab_size) float32 -> (num_rows,) int64.

        Raises:
            LogitsError: a row has no finite maximum: it holds NaN, say.
        """
        scores = logits
        if not params.is_all_greedy:
            scores = torch.where(
                params.is_greedy.unsqueeze(1), logits, self._random_scores(logits, params)
            )
        token_ids = scores.argmax(dim=-1)  # the first of equals; NaN counts as the largest
        chosen = scores.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        if not chosen.isfinite().all():
            row = int(chosen.isfinite().logical_not().nonzero()[0])
            raise broken_logits(row)
        return token_ids

    def _random_scores(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """Return scaled logits with noise, (num_rows, vocab_size). Greedy rows are not used."""
        # The largest logit is subtracted, so that even a tiny temperature does not make it
        # infinite. The temperature is clamped, because 1e-60 is valid, but 0 in float32.
        differences = logits - logits.amax(dim=-1, keepdim=True)
        scores = differences / params.temperatures.clamp(min=FLOAT32.tiny).unsqueeze(1)
        if params.filtered_rows is not None:
            scores[params.filtered_rows] = _keep_likeliest(
                scores[params.filtered_rows], params.top_ks, params.top_ps
            )
        return scores + gumbel_noise(params.noise_keys, logits.shape[-1])


def _keep_likeliest(scores: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Set all scores to -inf but the top-k and, within those, the top-p.

    Sorting is stable, so that exactly k tokens are kept; of equal ones those with the lowest ids.
    Top-p keeps the token with which the sum reaches p.

    Args:
        scores: (num_rows, vocab_size), logits over temperature.
        top_ks: (num_rows,).
        top_ps: (num_rows,).
    """
    sorted_scores, token_ids = scores.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    sorted_scores = sorted_scores.masked_fill(ranks >= top_ks.unsqueeze(1), -torch.inf)
    probabilities = sorted_scores.softmax(dim=-1)
    sum_before = probabilities.cumsum(dim=-1) - probabilities  # of all more likely tokens
    is_cut = (sum_before >= top_ps.unsqueeze(1)) & (ranks > 0)
    sorted_scores = sorted_scores.masked_fill(is_cut, -torch.inf)
    return torch.empty_like(scores).scatter_(1, token_ids, sorted_scores)


def gumbel_noise(noise_keys: Tensor, vocab_size: int) -> Tensor:
    """Return the noise of each row and token, (num_rows, vocab_size) float32.

    It is computed in float64: in float32 the largest u would be 1, and its noise infinite.

    Args:
        noise_keys: (2, num_rows) int64, the lower and upper 32 bits of each row's key.
        vocab_size: number of tokens.
    """
    lower, upper = noise_keys.unsqueeze(-1)  # (num_rows, 1) each
    indices = torch.arange(vocab_size, device=noise_keys.device)
    x = _mix32(_mix32(indices ^ lower) ^ upper)
    uniform = (x.double() + 0.5) / 2**32
    return -(-uniform.log()).log().float()


def _mix32(x: Tensor) -> Tensor:
    """Hash 32 bits, stored in int64 (lowbias32 of Chris Wellons).

    2**32 is subtracted from the second constant: the lower 32 bits of the product stay the same,
    and the product stays within int64.
    """
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & BITS_32
    x = x ^ (x >> 15)
    x = (x * (0x846CA68B - 2**32)) & BITS_32
    return x ^ (x >> 16)


def _noise_key(seed: int, position: int) -> int:
    """Return the key, 64 bits, of one row's noise."""
    return _splitmix64(_splitmix64(seed & BITS_64) ^ position)


def _splitmix64(x: int) -> int:
    """Hash 64 bits (the output function of Vigna's splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & BITS_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS_64
    return x ^ (x >> 31)


def broken_logits(row: int) -> LogitsError:
    """Return the error of a row that cannot be sampled from."""
    return LogitsError(
        f"Row {row} of the logits has no largest finite number (it may hold NaN): the model's "
        "weights or its computation are broken."
    )
