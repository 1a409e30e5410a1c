"""InputProcessor: what a caller hands in -> token ids and SamplingParams, or a clear error.

Knows the tokenizer and the vocabulary's size. Does not know limits that depend on the engine's
state or pool (`Scheduler.check_request`). Whatever is wrong is said before anything is queued.
vLLM's counterpart is `vllm/v1/engine/input_processor.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.errors import TokenizerError
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.tokenizer import check_unicode

if TYPE_CHECKING:
    from nanovllm.utils.tokenizer import Tokenizer


class InputProcessor:
    """Checks and encodes prompts.

    Args:
        tokenizer: for prompts given as text.
        vocab_size: token ids are below it.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size

    def batch(
        self, prompts: object, sampling_params: object
    ) -> list[tuple[list[int], SamplingParams]]:
        """Pair every prompt with its sampling params.

        Raises:
            TypeError: not a list of prompts, or something among them that is none.
            ValueError: an empty prompt, ids outside the vocabulary, or lists of different lengths.
        """
        if isinstance(prompts, str) or not isinstance(prompts, (list, tuple)):
            raise TypeError(f"prompts must be a list of prompts, not {type(prompts).__name__}")
        if not isinstance(sampling_params, (list, tuple)):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts, but {len(sampling_params)} sampling_params: "
                "give one for all, or one for each"
            )
        return [self.one(*pair) for pair in zip(prompts, sampling_params, strict=True)]

    def one(self, prompt: object, sampling_params: object) -> tuple[list[int], SamplingParams]:
        """Check and encode one request; raises as `batch` does."""
        if sampling_params is None:
            sampling_params = SamplingParams()
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, not {sampling_params!r}")
        if isinstance(prompt, str):
            check_unicode(prompt)
            token_ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, (list, tuple)):
            token_ids = list(prompt)
        else:
            raise TypeError(f"a prompt must be a str or a list of token ids, not {prompt!r}")
        if not token_ids:
            raise ValueError("a prompt must have at least one token; this one is empty")
        self._check_token_ids(token_ids)
        self._check_token_ids(list(sampling_params.stop_token_ids or ()))
        if (sampling_params.logprobs or 0) > self.vocab_size:
            raise ValueError(
                f"logprobs={sampling_params.logprobs} asks for more tokens than the vocabulary "
                f"has: at most {self.vocab_size}"
            )
        if sampling_params.stop:
            self.check_detokenizable("stop strings need")
        return token_ids, sampling_params

    def check_detokenizable(self, need: str) -> None:
        """Raise TokenizerError if no text can be made token by token."""
        if not self.tokenizer.exists:
            raise TokenizerError(
                f"{need} a tokenizer, and {self.tokenizer.folder} holds none: add "
                "tokenizer.json and tokenizer_config.json"
            )
        self.tokenizer.token_bytes(0)

    def _check_token_ids(self, token_ids: list[Any]) -> None:
        # A prompt may have a hundred thousand: look at them one by one only to name the culprit.
        if set(map(type, token_ids)) <= {int} and (
            not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.vocab_size)
        ):
            return
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise TypeError(f"a token id must be an int, not {token_id!r}")
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"token id {token_id} is outside the vocabulary [0, {self.vocab_size})"
                )
