"""SamplingParams: the sampling options of one request, checked when they are created.

`layers/sampler.py` uses them. The names and meanings are vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.utils.options import optional, real_number, texts, truth, whole_number, whole_numbers
from nanovllm.utils.vllm_names import accepts_vllm_options

if TYPE_CHECKING:
    from collections.abc import Sequence


@accepts_vllm_options("__init__")
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are sampled, and when it ends.

    Attributes:
        temperature: 0 takes the most likely token (greedy, lowest id on ties); larger is more
            random.
        max_tokens: the request ends after this many generated tokens (1 or more).
        ignore_eos: go on after an end-of-sequence token (for benchmarks).
        stop_token_ids: the request also ends after any of these, even with `ignore_eos`.
        stop: a string, or several. The request ends when its text contains one of them; the
            returned text ends before it. Special tokens are not part of the text.
        logprobs: return the log-probability of each generated token, and of this many of the most
            likely ones; 0 for the generated token alone, None for none. They are the model's,
            before temperature, top_k and top_p.
        top_k: sample from the k most likely tokens only; None, -1 or 0 means all.
        top_p: sample from the fewest tokens whose probabilities, after temperature and top_k, add
            up to at least this, in (0, 1].
        seed: the same seed gives the same random numbers in any batch; None or -1 lets the engine
            give each request its own seed.

    Raises:
        TypeError: a value is not of its type.
        ValueError: a value is out of its range.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def keep(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        number = real_number("temperature", self.temperature, low=0, high=1e6, with_low=True)
        keep("temperature", number)
        keep("top_p", real_number("top_p", self.top_p, low=0, high=1, with_low=False))
        keep("max_tokens", whole_number("max_tokens", self.max_tokens, at_least=1, below=2**31))
        keep("ignore_eos", truth("ignore_eos", self.ignore_eos))
        keep("stop_token_ids", whole_numbers("stop_token_ids", self.stop_token_ids))
        keep("stop", texts("stop", self.stop))
        if self.logprobs is not None:
            keep("logprobs", whole_number("logprobs", self.logprobs, at_least=0, below=2**31))
        keep("top_k", optional("top_k", self.top_k, at_least=1, below=2**31))
        keep("seed", optional("seed", self.seed, at_least=0, below=2**64))

    @property
    def is_filtered(self) -> bool:
        """Is a token sampled from a part of the vocabulary only, by top_k or top_p?"""
        return self.temperature > 0 and (self.top_k is not None or self.top_p < 1)
