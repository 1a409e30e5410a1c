"""Sequence: one request, from arrival to end, with its tokens and KV blocks.

vLLM's counterpart is `vllm/v1/request.py`.

    WAITING --admitted--> RUNNING --eos, max_tokens ... (FinishReason)--> FINISHED
       ^                     |
       +------preempted------+            (and from anywhere: aborted -> FINISHED)

Admitted: it gets blocks. Preempted: it loses them, so that an older one can go on.

For each of its tokens, attention needs the keys and values (K and V) of every layer. They are kept
in blocks of the KV cache; a block holds those of `kvcache_block_size` tokens (`block_manager.py`).
A WAITING sequence holds no block. A RUNNING one holds the blocks of all its tokens; the token that
was sampled last may not have one yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nanovllm.sampling_params import SamplingParams

FinishReason = Literal["eos", "stop_token", "stop_string", "max_tokens", "max_model_len", "aborted"]


class SequenceStatus(StrEnum):
    """The status of a sequence."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's state.

    Attributes:
        seq_id: its number in the engine, from 0.
        token_ids: prompt and completion, one list.
        sampling_params: the sampling options of the request.
        seed: the seed of its random numbers, which also depend on the position.
        num_prompt_tokens: how many of `token_ids` are the prompt.
        max_num_tokens: it ends at this length: prompt and max_tokens, at most max_model_len.
        end_token_ids: it also ends with any of these tokens; set when it is queued.
        logprobs: for each generated token, token id -> log-probability; empty if not requested.
        status: WAITING, RUNNING or FINISHED.
        finish_reason: why it ended; None before.
        num_computed_tokens: of how many tokens, from the first on, K and V are in the blocks. 0
            while it waits, and after it has ended.
        num_cached_tokens: how many of those were found in the prefix cache when it was last
            admitted; 0 while it waits, and after it has ended.
        num_prefill_tokens: its length when it was last admitted: this many tokens must be
            computed before the next one can be sampled. 0 before its first admission.
        block_table: block ids; token i is in block block_table[i // block_size].
        block_hashes: the hashes of its full blocks, as far as they were needed. They are kept when
            it is preempted, because its tokens do not change.
    """

    seq_id: int
    token_ids: list[int]
    sampling_params: SamplingParams
    seed: int = 0
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    end_token_ids: frozenset[int] = frozenset()
    logprobs: list[dict[int, float]] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefill_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)  # a copy: this list grows
        self.num_prompt_tokens = len(self.token_ids)
        self.max_num_tokens = self.num_prompt_tokens + self.sampling_params.max_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status}, {self.num_prompt_tokens}+"
            f"{self.num_completion_tokens} tokens, {self.num_computed_tokens} computed)"
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and completion together."""
        return len(self.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def completion_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K and V are still to be computed. During decode: 1, the last one."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        """While it runs: is a part of its prefill still to be computed?"""
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def is_finished(self) -> bool:
        """Has it ended?"""
        return self.status is SequenceStatus.FINISHED
