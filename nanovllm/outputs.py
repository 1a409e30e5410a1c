"""RequestOutput: what the caller gets back for one request.

Knows how an end is named. Does not know the engine. vLLM's counterpart is `vllm/outputs.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Sequence
    from nanovllm.errors import RequestRefusedError

_FINISH_REASONS = {
    "eos": "stop",
    "stop_token": "stop",
    "stop_string": "stop",
    "max_tokens": "length",
    "max_model_len": "length",
    "aborted": "abort",
}


class RequestOutput(TypedDict):
    """What became of one request.

    `finish_reason` is vLLM's word: "stop", "length" or "abort"; and "refused" for a request that
    could never fit, with `error` saying why and no seq_id. `reason` is the trace's, which tells
    more: "eos", "stop_token", "stop_string", "max_tokens", "max_model_len", "aborted",
    "prompt_too_long", "never_fits".

    `text` leaves special tokens out, and ends before a stop string; `token_ids` holds every
    generated token, those of the stop string included.
    """

    seq_id: int | None
    text: str
    token_ids: list[int]
    finish_reason: str
    reason: str
    num_prompt_tokens: int
    error: str | None


def finished_output(seq: Sequence, text: str) -> RequestOutput:
    """The output of a request that has ended."""
    reason = str(seq.finish_reason)
    return RequestOutput(
        seq_id=seq.seq_id,
        text=text,
        token_ids=seq.completion_token_ids,
        finish_reason=_FINISH_REASONS[reason],
        reason=reason,
        num_prompt_tokens=seq.num_prompt_tokens,
        error=None,
    )


def refused_output(num_prompt_tokens: int, error: RequestRefusedError) -> RequestOutput:
    """The output of a request that was never queued."""
    return RequestOutput(
        seq_id=None,
        text="",
        token_ids=[],
        finish_reason="refused",
        reason=error.reason,
        num_prompt_tokens=num_prompt_tokens,
        error=str(error),
    )
