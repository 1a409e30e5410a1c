"""InputProcessor: a caller's prompt and sampling params -> a Request, or an error.

All checks are done before anything is queued. vLLM's counterpart is
`vllm/v1/utils/input_processor.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.errors import RequestRefusedError
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.options import as_list, prompt_text, token_ids

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.utils.tokenizer import Tokenizer

Request = tuple[list[int], SamplingParams, str | None]
"""A prompt's token ids, its sampling params, and its text if it was given; all checked."""
_PROMPT_KEYS = {"prompt", "prompt_token_ids"}  # of vLLM's TextPrompt and TokensPrompt


class InputProcessor:
    """Checks and encodes prompts.

    Args:
        tokenizer: for prompts given as text.
        vocab_size: token ids are below it.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size

    def batch(self, prompts: object, sampling_params: object) -> list[Request]:
        """Pair every prompt with its sampling params. A single text or dict is one prompt.

        Raises:
            TypeError: not a list of prompts, or an item of it is not a prompt.
            ValueError: an empty prompt, ids outside the vocabulary, or lists of different lengths.
        """
        found = [prompts] if isinstance(prompts, (str, dict)) else as_list(prompts)
        if found is None:
            raise TypeError(f"prompts must be a list of prompts, not {type(prompts).__name__}")
        if not isinstance(sampling_params, (list, tuple)):
            sampling_params = [sampling_params] * len(found)
        if len(sampling_params) != len(found):
            raise ValueError(
                f"{len(found)} prompts, but {len(sampling_params)} sampling_params: "
                "give one for all, or one for each"
            )
        return [self.one(*pair) for pair in zip(found, sampling_params, strict=True)]

    def one(self, prompt: object, sampling_params: object) -> Request:
        """Check and encode one request; raises as `batch` does."""
        if sampling_params is None:
            sampling_params = SamplingParams()
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, not {sampling_params!r}")
        text, ids = self._text_and_ids(prompt)
        if not ids:
            raise ValueError("a prompt must have at least one token; this one is empty")
        ids = token_ids(ids, self.vocab_size)
        token_ids(list(sampling_params.stop_token_ids or ()), self.vocab_size)
        if (sampling_params.logprobs or 0) > self.vocab_size:
            raise ValueError(
                f"logprobs={sampling_params.logprobs} asks for more tokens than the vocabulary "
                f"has: give at most {self.vocab_size}"
            )
        if sampling_params.stop:
            self.tokenizer.check_detokenizable("stop strings need")
        return ids, sampling_params, text

    def _text_and_ids(self, prompt: object) -> tuple[str | None, list[int]]:
        parts = prompt if isinstance(prompt, dict) else {}
        if parts.keys() - _PROMPT_KEYS or not parts:
            parts = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        text, ids = parts.get("prompt"), parts.get("prompt_token_ids")
        if isinstance(text, str):
            text = prompt_text(text)
            ids = self.tokenizer.encode(text) if ids is None else ids
        found = as_list(ids)
        if found is None or not isinstance(text, str | None):
            raise TypeError(
                "a prompt must be a str or a list of token ids, or a dict with one of them as "
                f"prompt or prompt_token_ids, not {prompt!r}"
            )
        return text, found


def check_fits(
    num_prompt_tokens: int, max_tokens: int, scheduler: Scheduler, max_positions: int | None = None
) -> None:
    """Refuse a request that could never finish.

    Args:
        num_prompt_tokens: of its prompt.
        max_tokens: how many tokens it may generate.
        scheduler: has the limits.
        max_positions: the highest possible max_model_len; None if unknown.

    Raises:
        RequestRefusedError: it may become longer than max_model_len or than the block pool.
    """
    limit, pool = scheduler.max_model_len, scheduler.block_manager
    if num_prompt_tokens >= limit:
        advice = "raise max_model_len"
        if max_positions is not None and num_prompt_tokens >= max_positions:
            advice = f"take another model: this one has positions for {max_positions} tokens"
        raise RequestRefusedError(
            f"the prompt has {num_prompt_tokens} tokens, but max_model_len={limit} bounds prompt "
            f"and completion together: shorten the prompt or {advice}",
            reason="prompt_too_long",
            need=num_prompt_tokens + 1,
            have=limit,
        )
    # The last token is sampled but never computed: it needs no slot.
    longest = min(num_prompt_tokens + max_tokens, limit) - 1
    need, have = pool.blocks_for(longest), pool.num_blocks
    if need > have:
        raise RequestRefusedError(
            f"the request may grow to {longest} tokens in the KV cache = {need} blocks of "
            f"{pool.block_size} tokens, but the pool has {have}: lower max_tokens, shorten the "
            f"prompt, or raise num_kvcache_blocks to {need}",
            reason="never_fits",
            need=need,
            have=have,
        )
