"""Batch: who runs in one step and with how many tokens. A value, from scheduler to runner.

Knows sequences and counts. Does not know why they were chosen (the scheduler's business) or what
tensors they become (`model_inputs.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Sequence

Phase = Literal["prefill", "decode"]


@dataclass(slots=True)
class Batch:
    """One step's work.

    Attributes:
        phase: "prefill" computes prompts (or chunks of them), "decode" one token a sequence.
        seqs: the sequences, in the order in which their tokens are laid out.
        num_scheduled_tokens: for each, how many tokens are computed in this step.
        sampled_seqs: those whose last token is computed in this step, so that the next one can be
            sampled; an unfinished chunk is not among them.
    """

    phase: Phase
    seqs: list[Sequence] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    sampled_seqs: list[Sequence] = field(default_factory=list)

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """Let `seq` compute its next `num_tokens` tokens in this step."""
        self.seqs.append(seq)
        self.num_scheduled_tokens.append(num_tokens)
        if num_tokens == seq.num_uncomputed_tokens:
            self.sampled_seqs.append(seq)

    def __bool__(self) -> bool:
        return bool(self.seqs)
