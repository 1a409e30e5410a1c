"""Workloads: which prompts, and how many tokens are asked for.

Knows seeds and lengths. Does not know models beyond the size of their vocabulary, nor who will do
the work. Prompts are random token ids: their text does not matter, their lengths do.

    uneven   16 prompts of 16 to 128 tokens, outputs of 16 to 192: a batch whose requests end at
             different times, so that a static one carries the dead with it
    seed     the benchmark of nano-vllm, which this engine grew from: 256 requests of 100 to 1024
             tokens each way, 133,966 output tokens with seed 0
    decode   equal requests, all at the same place: one step class after the other
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
    """A prompt, and exactly how many tokens are asked for."""

    prompt_token_ids: tuple[int, ...]
    output_len: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that all arrive at once.

    Attributes:
        temperature: 0 takes the likeliest token, so that answers can be compared.
        is_comparison: do transformers' ways run beside the engine, unless the user says?
    """

    name: str
    requests: tuple[Request, ...]
    temperature: float = 0.0
    is_comparison: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that are handed in."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Useful tokens: those that are asked for."""
        return sum(request.output_len for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(request.prompt_token_ids) + request.output_len for request in self.requests)

    def num_blocks(self, block_size: int) -> int:
        """KV pages that hold all requests at once."""
        lengths = (len(r.prompt_token_ids) + r.output_len for r in self.requests)
        return sum(-(-length // block_size) for length in lengths)

    def first(self, num_requests: int | None) -> Workload:
        """The same workload with its first requests only; all of them if None."""
        return replace(self, requests=self.requests[:num_requests])


@dataclass(frozen=True, slots=True)
class DecodeClasses:
    """The step classes of `decode`: each batch size at each context length."""

    batch_sizes: tuple[int, ...]
    context_lens: tuple[int, ...]


# What a device can do in a minute or two.
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
    """Refuse what a model cannot be asked.

    Args:
        name: "uneven", "seed" or "decode".
        seed: of prompts and lengths.
        num_requests: the first requests only; None for all.
        classes: what `decode` goes through; nothing of it is drawn, since it may be huge.
        vocab_size: the model's.
        max_position_embeddings: the model's.

    Raises:
        BenchmarkError: no workload is called so, it draws token ids that the vocabulary does not
            have, or the model has no positions for its longest request.
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
        vocab_size: of the model that will run it, which `require_fitting` has let pass.
        classes: what `decode` goes through.
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
    """nano-vllm's benchmark, its numbers drawn in its order: all prompts, then all lengths."""
    draw = random.Random(seed)  # noqa: S311 - seeded, so that a benchmark can be repeated
    prompts = [_token_ids(draw, draw.randint(100, 1024), _SEED_LARGEST_ID + 1) for _ in range(256)]
    requests = [Request(prompt, draw.randint(100, 1024)) for prompt in prompts]
    return Workload("seed", tuple(requests), temperature=0.6)


def decode(batch_size: int, context_len: int, seed: int, vocab_size: int) -> Workload:
    """`batch_size` prompts of `context_len` tokens, and 32 decode steps of them all."""
    draw = random.Random(seed)  # noqa: S311 - seeded, so that a benchmark can be repeated
    requests = (
        Request(_token_ids(draw, context_len, vocab_size), _NUM_DECODE_STEPS + 1)  # one by prefill
        for _ in range(batch_size)
    )
    return Workload(f"decode {batch_size} x {context_len}", tuple(requests))


def _token_ids(draw: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(draw.randint(0, vocab_size - 1) for _ in range(length))
