"""Context: what attention and the LM head need to know about the step that is being computed.

A model's `forward` takes token ids and positions only. Attention needs more: the slots of the new
keys and values, those of the old ones, and where one sequence ends and the next begins. As
parameters they would be in the signature of every layer between, and all signatures would change
when one backend needs another value. So the runner sets a `Context` for one forward pass, and the
layers that need it get it. (vLLM: forward context and attention metadata.)

The context is in a `contextvars.ContextVar`, not in a module global: two engines in two threads do
not see each other's step.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@dataclass(slots=True)
class Context:
    """One step, for the layers.

    The tokens of all sequences are one after another in flat tensors. Two sequences, the first with
    3 tokens computed before and 2 new, the second with 4 new, block size 4:

        cu_seqlens_q    0       2               6      new tokens:     [a3 a4|b0 b1 b2 b3]
        cu_seqlens_k    0         5             9      whole contexts: [a0 a1 a2 a3 a4|b0 b1 b2 b3]
        slot_mapping    3 4 | 8 9 10 11                with block_tables [[0, 1], [2, 0]]

    (The second has one block: its last 0 is padding.)

    A slot is a token's place in the KV cache: block id * block size + offset in the block.

    Attributes:
        phase: in a `prefill` a sequence has any number of new tokens, in a `decode` one. For the
            layers, a mixed step is a prefill.
        slot_mapping: (num_tokens,) int64, the slot that each new token's K and V are written to.
        cu_seqlens_q: (num_seqs + 1,) int32, cumulative numbers of new tokens. Not used in a decode.
        cu_seqlens_k: (num_seqs + 1,) int32, cumulative context lengths (old and new). Not used
            in a decode.
        max_seqlen_q: the most new tokens of one sequence.
        max_seqlen_k: the longest context.
        context_lens: (num_seqs,) int32, tokens in the cache after this step has written its own.
        block_tables: (num_seqs, max_num_blocks) int32, each sequence's blocks in order, padded with
            0. None for a prefill in which no sequence has anything in the cache.
        logits_indices: (num_sampled,) int64, the rows of the flat hidden states that go to the
            head. None means all of them.
        plan: what the attention backend computed from these; made in the first attention layer,
            read by the others.
    """

    phase: Literal["prefill", "decode"]
    slot_mapping: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    context_lens: Tensor
    block_tables: Tensor | None
    logits_indices: Tensor | None

    plan: Any = field(default=None, init=False, repr=False, compare=False)


_current_context: ContextVar[Context] = ContextVar("nanovllm_context")


@contextmanager
def forward_context(context: Context) -> Iterator[Context]:
    """Make `context` the one that `get_context` returns, until the `with` ends."""
    token = _current_context.set(context)
    try:
        yield context
    finally:
        _current_context.reset(token)


def get_context() -> Context:
    """Return the context of the step being computed.

    Raises:
        RuntimeError: called outside of a `forward_context`.
    """
    try:
        return _current_context.get()
    except LookupError:
        raise RuntimeError(
            "No step is being computed, and attention and the head need its context. "
            "Call the model inside `with forward_context(Context(...)):`."
        ) from None
