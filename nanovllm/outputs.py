"""RequestOutput: what the caller gets back for one request.

vLLM's counterpart is `vllm/outputs.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, cast

from nanovllm.utils.vllm_names import no_such

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


class RequestOutput(dict[str, Any]):
    """The result of one request: a dict, as in nano-vllm; its keys are attributes as well.

    Scripts for vLLM read attributes, and `outputs`, the list of the request's completions. Here it
    holds one item, which is this dict again: output["text"], output.text and output.outputs[0].text
    are the same. What generate() returns also has `prompt` (the text; None if the prompt was given
    as token ids) and `prompt_token_ids`.

    `finish_reason` is as in vLLM: "stop", "length" or "abort"; or "refused" for a request that
    could never finish, which has no seq_id, and the reason in `error`. `reason` is as in the trace,
    and more precise: "eos", "stop_token", "stop_string", "max_tokens", "max_model_len", "aborted",
    "prompt_too_long", "never_fits".

    `text` has no special tokens, and ends before a stop string; `token_ids` holds every generated
    token, also those of the stop string. `logprobs` is None unless the sampling params request
    them; else it holds, for each of `token_ids`, token id -> log-probability: first the generated
    token's own, then those of the most likely tokens, in that order.
    """

    seq_id: int | None
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    finish_reason: str
    reason: str
    num_prompt_tokens: int
    error: str | None
    prompt: str | None
    prompt_token_ids: list[int]
    finished, index = True, 0  # as in vLLM: the completion has ended, and is the first

    @property
    def outputs(self) -> list[RequestOutput]:
        """The completions: this one."""
        return [self]

    if not TYPE_CHECKING:  # a type checker knows the names

        def __getattr__(self, name: str) -> object:
            if name in self:
                return self[name]
            raise AttributeError(no_such("an output has no", name, [*self, "outputs"]))


class StreamOutput(TypedDict):
    """The new text of one request of a stream.

    All values of `delta`, joined, are the `text` that generate() would return. `token_ids` are all
    tokens so far, and `logprobs` theirs. `index` is the index of the prompt in the list of prompts;
    None for a request from add_request(). `finish_reason`, `reason` and `error` are those of
    RequestOutput, and None until the request's last output.
    """

    seq_id: int | None
    index: int | None
    delta: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    reason: str | None
    error: str | None


def request_output(seq: Sequence, text: str = "") -> RequestOutput:
    """What a request has generated so far."""
    reason = seq.finish_reason
    return RequestOutput(
        seq_id=seq.seq_id,
        text=text,
        token_ids=seq.completion_token_ids,
        logprobs=None if seq.sampling_params.logprobs is None else list(seq.logprobs),
        finish_reason=None if reason is None else _FINISH_REASONS[reason],
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
        logprobs=None,
        finish_reason="refused",
        reason=error.reason,
        num_prompt_tokens=num_prompt_tokens,
        error=str(error),
    )


def stream_output(output: RequestOutput, delta: str, index: int | None) -> StreamOutput:
    """The new text `delta` of a request that has generated `output` so far."""
    facts = {**output, "delta": delta, "index": index}
    return cast("StreamOutput", {name: facts[name] for name in StreamOutput.__annotations__})
