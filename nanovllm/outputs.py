"""RequestOutput: what the caller gets back for one request.

Knows vLLM's names of the finish reasons. Does not know the engine.
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

    Scripts for vLLM read attributes. For them there is also `outputs`, the list of a request's
    completions: one, which is this dict again. So output["text"], output.text and
    output.outputs[0].text are the same. What generate() returns has `prompt` too, its text (None if
    it was given as token ids), and `prompt_token_ids`.

    `finish_reason` is vLLM's word: "stop", "length" or "abort"; and "refused" for a request that
    could never fit, with `error` saying why and no seq_id. `reason` is the trace's word, which is
    more precise: "eos", "stop_token", "stop_string", "max_tokens", "max_model_len", "aborted",
    "prompt_too_long", "never_fits".

    `text` leaves special tokens out, and ends before a stop string; `token_ids` holds every
    generated token, those of the stop string included. `logprobs` is None unless the sampling
    params ask for it; else, for each of `token_ids`, token id -> log-probability: that token's own
    first, then those of the most likely tokens, in that order.
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
    finished, index = True, 0  # vLLM's words for a completion that has ended, the request's first

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
    """What is new in one request, while it streams.

    `delta` continues the text: all deltas together are the `text` that generate() would return.
    `token_ids` are all tokens so far, and `logprobs` theirs. `index` is the request's place among
    the prompts; None for one from add_request(). `finish_reason`, `reason` and
    `error` are those of RequestOutput, and None until the request's last output.
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
    """What a request has got: all of it, once the request has ended."""
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
    """What is new in a request that has got `output` by now."""
    facts = {**output, "delta": delta, "index": index}
    return cast("StreamOutput", {name: facts[name] for name in StreamOutput.__annotations__})
