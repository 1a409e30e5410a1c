"""Sequence: one request from arrival to end. The noun that the whole engine passes around.

Knows its tokens, its pages and how far its KV cache reaches. Does not know queues, budgets or the
pool the pages come from. vLLM's counterpart is `vllm/v1/request.py`.

    WAITING --admitted--> RUNNING --eos, max_tokens ... (FinishReason)--> FINISHED
       ^                     |
       +------preempted------+            (and from anywhere: aborted -> FINISHED)

A WAITING sequence holds no page; a RUNNING one holds the pages of all its tokens, except perhaps of
the one that was sampled last.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nanovllm.sampling_params import SamplingParams

FinishReason = Literal["eos", "stop_token", "stop_string", "max_tokens", "max_model_len", "aborted"]


class SequenceStatus(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"


class Sequence:
    """One request's state.

    Attributes:
        seq_id: its number, counted by the engine it belongs to.
        token_ids: prompt and completion, one list.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: how many leading tokens have their K and V in the pages.
        num_cached_tokens: how many of those were found in the prefix cache when it was last
            admitted; 0 while it waits.
        num_prefill_tokens: its length when it was last admitted: so many tokens must be computed
            before the next one can be sampled.
        block_table: page numbers; token i lives in page block_table[i // block_size].
        block_hashes: the hash chain of its full blocks, as far as it was needed (kept through a
            preemption, since tokens never change).
        finish_reason: why it ended; None before.
        logprobs: for each generated token, token id -> log-probability; None if nobody asked.
        max_num_tokens: at this length it ends, set by the scheduler when it is queued.
        end_token_ids: with one of these it ends before, likewise.
        seed: what its random draws depend on, beside the position.
    """

    __slots__ = (
        "block_hashes",
        "block_table",
        "end_token_ids",
        "finish_reason",
        "logprobs",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "sampling_params",
        "seed",
        "seq_id",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        seed: int = 0,
    ) -> None:
        self.seq_id = seq_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_prefill_tokens = 0
        self.sampling_params = sampling_params
        self.seed = seed
        self.logprobs: list[dict[int, float]] | None = (
            None if sampling_params.logprobs is None else []
        )
        self.max_num_tokens = self.num_prompt_tokens + sampling_params.max_tokens
        self.end_token_ids: frozenset[int] = frozenset()
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []

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
        """Tokens whose K and V are still to be computed. In a steady decode: 1, the last one."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        """Of a running sequence: is its prefill not yet complete (between two chunks)?"""
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def is_resumed(self) -> bool:
        """Of a sequence that is just being admitted: was it admitted before, and preempted?"""
        return self.num_prefill_tokens > 0

    @property
    def is_finished(self) -> bool:
        """Has it ended?"""
        return self.status is SequenceStatus.FINISHED

    def append_token(self, token_id: int) -> None:
        """Take the token that was just sampled. Its K and V follow in the next step."""
        self.token_ids.append(token_id)
