"""Context: what a layer may need to know about the step that is being computed.

A model's `forward` takes token ids and positions and nothing else, because that is all its
mathematics needs. Attention needs more: where each new token's key and value go, where the old ones
lie, where one sequence ends and the next begins. Passed as parameters, they would be in the
signature of every layer that only hands them on, and all of these would change whenever one backend
needs one more. So the runner puts them in a `Context` for the length of one forward, and the few
layers that need it ask. (vLLM: forward context and attention metadata.)

The context lives in a `contextvars.ContextVar`, not in a module global: two engines in two threads
do not see each other's step.

Knows nothing of sequences, scheduling or block management: by now those are tensors.
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
    """One step, as the layers see it.

    The tokens of all sequences lie one after another in flat tensors. Two sequences, the first with
    3 tokens cached and 2 new, the second with 4 new, block size 4:

        cu_seqlens_q    0       2               6      new tokens:     [a3 a4|b0 b1 b2 b3]
        cu_seqlens_k    0         5             9      whole contexts: [a0 a1 a2 a3 a4|b0 b1 b2 b3]
        slot_mapping    3 4 | 8 9 10 11                with block_tables [[0, 1], [2, 0]]

    Attributes:
        phase: a `prefill` has any number of new tokens per sequence, a `decode` has one.
        slot_mapping: (num_tokens,) int64, the slot each new token's K and V are written to.
        cu_seqlens_q: (num_seqs + 1,) int32, cumulative numbers of new tokens. Not read in a decode.
        cu_seqlens_k: (num_seqs + 1,) int32, cumulative context lengths (cached and new). The same.
        max_seqlen_q: the most new tokens of one sequence.
        max_seqlen_k: the longest context.
        context_lens: (num_seqs,) int32, tokens in the cache once this step has written its own.
        block_tables: (num_seqs, max_num_blocks) int32, each sequence's blocks in order, then zeros
            that mean nothing. None for a prefill in which no sequence has anything cached.
        logits_indices: (num_sampled,) int64, the rows of the flat hidden states that go to the
            head. None sends all of them.
        plan: what the attention backend derived from all this: made in the first attention
            layer, read by the others.
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
        RuntimeError: called outside of any `forward_context`.
    """
    try:
        return _current_context.get()
    except LookupError:
        raise RuntimeError(
            "No step is being computed, and attention and the head need its context. "
            "Call the model inside `with forward_context(Context(...)):`."
        ) from None
