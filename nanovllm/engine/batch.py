"""Batch: the sequences of one step, with how many tokens each. From the scheduler to the runner.

`scheduler.py` chooses the sequences; `model_inputs.py` turns them into inputs of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Sequence

# prefill: any number of tokens of a prompt; decode: one token of a sequence; mixed: both.
Phase = Literal["prefill", "decode", "mixed"]


@dataclass(slots=True)
class Batch:
    """One step's work.

    Attributes:
        token_budget: how many more tokens this step may compute.
        seqs: the sequences, in the order of their tokens in the model's inputs.
        num_scheduled_tokens: for each sequence, how many tokens are computed in this step.
        num_prefills: how many sequences compute their prompt, or a chunk of it (after a
            preemption, also what they had generated); the others compute the token sampled last.
        sampled_seqs: those whose last token is computed in this step, so that the next one can be
            sampled. A prompt of which a part is left to compute is not among them.
    """

    token_budget: int
    seqs: list[Sequence] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    num_prefills: int = 0
    sampled_seqs: list[Sequence] = field(default_factory=list)

    def add(self, seq: Sequence) -> None:
        """Add `seq` with as many of its uncomputed tokens as the budget allows."""
        num_uncomputed_tokens = seq.num_uncomputed_tokens
        num_tokens = min(num_uncomputed_tokens, self.token_budget)
        self.token_budget -= num_tokens
        self.seqs.append(seq)
        self.num_scheduled_tokens.append(num_tokens)
        self.num_prefills += seq.is_prefilling
        if num_tokens == num_uncomputed_tokens:
            self.sampled_seqs.append(seq)

    def add_decode(self, seq: Sequence) -> None:
        """Add `seq` with the one token that was sampled last. The same as `add`, but faster."""
        self.token_budget -= 1
        self.seqs.append(seq)
        self.num_scheduled_tokens.append(1)
        self.sampled_seqs.append(seq)

    @property
    def phase(self) -> Phase:
        """What the step is: "prefill" or "decode" if all sequences do that, else "mixed"."""
        if self.num_prefills == 0:
            return "decode"
        return "prefill" if self.num_prefills == len(self.seqs) else "mixed"

    def __bool__(self) -> bool:
        return bool(self.seqs)
