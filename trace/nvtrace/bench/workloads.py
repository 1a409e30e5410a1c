"""Workloads: prompts, and how many tokens to generate.

Prompts are random token ids: only their lengths matter.

    uneven   16 prompts of 16 to 128 tokens, outputs of 16 to 192: the requests end at different
             times, so that a static batch has more and more empty places
    seed     the benchmark of nano-vllm, on which this engine is based: 256 requests with prompts
             and outputs of 100 to 1024 tokens, 133,966 output tokens with seed 0
    decode   equal requests, all at the same position: one step class after another
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from nvtrace.bench import BenchmarkError

_SEED_LARGEST_ID = 10_000
_NUM_DECODE_STEPS = 32
WORKLOADS = ("uneven", "seed", "decode")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and exactly how many tokens to generate."""

    prompt_token_ids: tuple[int, ...]
    output_len: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that all arrive at once.

    Attributes:
        temperature: 0 takes the most likely token, so that answers can be compared.
        is_comparison: is it compared with transformers by default?
    """

    name: str
    requests: tuple[Request, ...]
    temperature: float = 0.0
    is_comparison: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Tokens to generate, of all requests."""
        return sum(request.output_len for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(len(request.prompt_token_ids) + request.output_len for request in self.requests)

    def num_blocks(self, block_size: int) -> int:
        """KV blocks that hold all requests at once."""
        lengths = (len(r.prompt_token_ids) + r.output_len for r in self.requests)
        return sum(-(-length // block_size) for length in lengths)

    def first(self, num_requests: int | None) -> Workload:
        """The same workload with the first requests only; None for all."""
        return replace(self, requests=self.requests[:num_requests])


@dataclass(frozen=True, slots=True)
class DecodeClasses:
    """The step classes of `decode`: each batch size at each context length."""

    batch_sizes: tuple[int, ...]
    context_lens: tuple[int, ...]


# These take a minute or two on such a device.
CPU_CLASSES = DecodeClasses((1, 16, 32), (512,))
GPU_CLASSES = DecodeClasses((1, 16, 64, 256), (512, 2048))


def require_fitting(
    name: str,
    seed: int,
    num_requests: int | None,
    classes: DecodeClasses,
    *,
    vocab_size: int,
    max_position_embeddings: int,
) -> None:
    """Check that a model can run a workload.

    Args:
        name: "uneven", "seed" or "decode".
        seed: of prompts and lengths.
        num_requests: the first requests only; None for all.
        classes: of `decode`. Its prompts are not created here, because they may be huge.
        vocab_size: the model's.
        max_position_embeddings: the model's.

    Raises:
        BenchmarkError: there is no such workload, or the model's vocabulary is too small, or its
            longest request has more tokens than the model has positions.
    """
    if name not in WORKLOADS:
        raise BenchmarkError(f"there is no workload {name}: use one of {', '.join(WORKLOADS)}")
    if name == "seed" and vocab_size <= _SEED_LARGEST_ID:
        raise BenchmarkError(
            f"the workload seed draws token ids up to {_SEED_LARGEST_ID}, and this model's "
            f"vocabulary has {vocab_size}: take a larger model, 50m or 0.6b"
        )
    instead = "a model with more"
    if name == "decode":
        longest = max(classes.context_lens) + _NUM_DECODE_STEPS + 1
        instead = f"a smaller --context, or {instead}"
    else:
        [workload] = make_workloads(name, seed, vocab_size, classes)
        longest = workload.first(num_requests).longest
    if longest > max_position_embeddings:
        raise BenchmarkError(
            f"the longest request of {name} takes {longest} positions, prompt and output, and this "
            f"model has {max_position_embeddings}: take {instead}"
        )


def make_workloads(name: str, seed: int, vocab_size: int, classes: DecodeClasses) -> list[Workload]:
    """One workload, or one for each step class of `decode`.

    Args:
        name: "uneven", "seed" or "decode".
        seed: of prompts and lengths.
        vocab_size: of the model that will run it, checked by `require_fitting`.
        classes: of `decode`.
    """
    if name == "uneven":
        return [uneven(seed, vocab_size)]
    if name == "seed":
        return [nano_vllm(seed)]
    return [
        decode(batch_size, context_len, seed, vocab_size)
        for context_len in classes.context_lens
        for batch_size in classes.batch_sizes
    ]


def uneven(seed: int, vocab_size: int) -> Workload:
    """16 prompts of 16 to 128 tokens, with outputs of 16 to 192."""
    draw = random.Random(seed)  # noqa: S311 - seeded, so that a benchmark can be repeated
    requests = (
        Request(_token_ids(draw, draw.randint(16, 128), vocab_size), draw.randint(16, 192))
        for _ in range(16)
    )
    return Workload("uneven", tuple(requests), is_comparison=True)


def nano_vllm(seed: int) -> Workload:
    """nano-vllm's benchmark, with its order of random numbers: all prompts, then all lengths."""
    draw = random.Random(seed)  # noqa: S311 - seeded, so that a benchmark can be repeated
    prompts = [_token_ids(draw, draw.randint(100, 1024), _SEED_LARGEST_ID + 1) for _ in range(256)]
    requests = [Request(prompt, draw.randint(100, 1024)) for prompt in prompts]
    return Workload("seed", tuple(requests), temperature=0.6)


def decode(batch_size: int, context_len: int, seed: int, vocab_size: int) -> Workload:
    """`batch_size` prompts of `context_len` tokens, and 32 decode steps of all of them."""
    draw = random.Random(seed)  # noqa: S311 - seeded, so that a benchmark can be repeated
    requests = (
        Request(_token_ids(draw, context_len, vocab_size), _NUM_DECODE_STEPS + 1)  # one by prefill
        for _ in range(batch_size)
    )
    return Workload(f"decode {batch_size} x {context_len}", tuple(requests))


def _token_ids(draw: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(draw.randint(0, vocab_size - 1) for _ in range(length))
