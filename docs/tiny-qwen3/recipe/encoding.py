"""From conversations to token ids, and from token ids to padded batches.

This module knows the chat format of training. It does not know what is asked, nor the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from recipe.tokenizer import TURN_END, TURN_START

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from tokenizers import Tokenizer

    from recipe.samples import Sample

IGNORED = -100  # cross_entropy's default ignore_index: no loss here
CARELESS_SHARE = 0.25  # of the questions; see `Encoder.careless_ids`


@dataclass(frozen=True, slots=True)
class Encoded:
    """A conversation as tokens; what the assistant says begins at `num_prompt_tokens`."""

    token_ids: list[int]
    num_prompt_tokens: int


class Encoder:
    """Turns samples into tokens, as the chat template and the tokenizer would."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.known: dict[str, list[int]] = {}  # the same replies and frames come again and again

    def prompt(self, question: str, system: str | None = None, *, is_thinking: bool = True) -> str:
        """The prompt as text; equal to the chat template's (a test compares the two)."""
        head = f"{TURN_START}system\n{system}{TURN_END}\n" if system is not None else ""
        tail = "" if is_thinking else "<think>\n\n</think>\n\n"
        return f"{head}{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n{tail}"

    def encode(self, sample: Sample, rng: Random) -> Encoded:
        """A training sample; one question in four is cut into tokens carelessly."""
        whole = self.prompt(sample.question, sample.system, is_thinking=sample.is_thinking)
        before, after = whole.rsplit(f"user\n{sample.question}{TURN_END}", 1)
        is_careless = rng.random() < CARELESS_SHARE
        prompt_ids = [
            *self.ids(f"{before}user\n"),
            *(
                self.careless_ids(sample.question, rng)
                if is_careless
                else self.ids(sample.question)
            ),
            *self.ids(f"{TURN_END}{after}"),
        ]
        completion = sample.reply.text(is_thinking=sample.is_thinking) + TURN_END
        return Encoded([*prompt_ids, *self.ids(completion)], len(prompt_ids))

    def careless_ids(self, text: str, rng: Random) -> list[int]:
        """The ids of a text cut at one to three random places, often in the middle of a word.

        So the model meets words in odd pieces, as it will meet words that it was never taught.
        """
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randint(1, 3)))
        pieces = (text[start:end] for start, end in pairwise([0, *cuts, len(text)]))
        return [token for piece in pieces for token in self.tokenizer.encode(piece).ids]

    def ids(self, text: str) -> list[int]:
        """The token ids of a text in which special tokens count as such."""
        if text not in self.known:
            self.known[text] = self.tokenizer.encode(text).ids
        return self.known[text]


def batches(
    samples: list[Encoded], max_tokens: int, rng: Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of samples of about the same length, in random order.

    Yields:
        input_ids and labels, both (num_samples, longest), with num_samples * longest <= max_tokens
        (a sample longer than that comes alone). Padding stands on the right, where causal
        attention never looks from a real token, so no attention mask is needed.
    """
    by_length = sorted(samples, key=lambda sample: (len(sample.token_ids), sample.token_ids))
    groups: list[list[Encoded]] = [[]]
    for sample in by_length:
        if groups[-1] and (len(groups[-1]) + 1) * len(sample.token_ids) > max_tokens:
            groups.append([])
        groups[-1].append(sample)
    rng.shuffle(groups)
    for group in groups:
        longest = max(len(sample.token_ids) for sample in group)
        input_ids = torch.zeros(len(group), longest, dtype=torch.int64)
        labels = torch.full((len(group), longest), IGNORED, dtype=torch.int64)
        for row, sample in enumerate(group):
            end = len(sample.token_ids)
            input_ids[row, :end] = torch.tensor(sample.token_ids)
            labels[row, sample.num_prompt_tokens : end] = input_ids[
                row, sample.num_prompt_tokens : end
            ]
        yield input_ids, labels
