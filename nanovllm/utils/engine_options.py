"""Checks of the options of `Config`: each alone, and against the model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from nanovllm.gpu.attention_choice import ATTENTION_BACKENDS
from nanovllm.utils.options import choice, real_number, truth, whole_number
from nanovllm.utils.vllm_names import own_options

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from nanovllm.utils.model_config import ModelConfig

_COUNT = partial(whole_number, at_least=1, below=2**31)


def _length(name: str, value: object) -> int:
    number = _COUNT(name, value)
    if number == 1:
        raise ValueError("max_model_len must be at least 2: one prompt token and one more")
    return number


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "max_num_batched_tokens": _COUNT,
    "max_num_seqs": _COUNT,
    "max_model_len": _length,
    "gpu_memory_utilization": partial(real_number, low=0, high=1, with_low=False),
    "tensor_parallel_size": _COUNT,
    "distributed_timeout": partial(real_number, low=0, high=7 * 24 * 3600, with_low=False),
    "enforce_eager": truth,
    "kvcache_block_size": _COUNT,
    "num_kvcache_blocks": lambda name, value: None if value is None else _COUNT(name, value),
    "device": partial(choice, choices=("auto", "cpu", "cuda")),
    "dtype": partial(choice, choices=("auto", "float32", "float16", "bfloat16")),
    "attention_backend": partial(choice, choices=("auto", *ATTENTION_BACKENDS)),
    "fused_kernels": truth,
    "enable_prefix_caching": truth,
    "seed": partial(whole_number, at_least=0, below=2**64),
}


def checked_options(
    options: Mapping[str, Any], known: Collection[str], policies: Collection[str]
) -> dict[str, Any]:
    """Return the options of `Config`, as Python's own types.

    Raises:
        TypeError: an option is unknown, or a value is of the wrong type.
        ValueError: a value is out of range.
    """
    checks = _CHECKS | {"policy": partial(choice, choices=tuple(policies))}
    own = own_options("LLM()", options, known)
    return {name: checks[name](name, value) for name, value in own.items()}


def check_split(num_ranks: int, model: ModelConfig) -> None:
    """Check that heads and MLP can be split into equal parts, one for each rank.

    If there are fewer KV heads than ranks, each must have the same number of copies. The vocabulary
    need not be divisible: it is padded.

    Raises:
        ValueError: they cannot; the message says by which numbers they can.
    """
    obstacle = _obstacle(num_ranks, model)
    if obstacle is not None:
        numbers = range(1, model.num_attention_heads + 1)
        possible = [str(number) for number in numbers if _obstacle(number, model) is None]
        raise ValueError(
            f"this model cannot be split by tensor_parallel_size={num_ranks}: {obstacle}; "
            f"it can be split by {', '.join(possible)}"
        )


def _obstacle(num_ranks: int, model: ModelConfig) -> str | None:
    for name in ("num_attention_heads", "intermediate_size"):
        whole = getattr(model, name)
        if whole % num_ranks:
            return f"it does not divide {name}={whole}"
    num_kv_heads = model.num_key_value_heads
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        return f"neither it nor num_key_value_heads={num_kv_heads} divides the other"
    return None
