"""Checks of the engine's options, one by one and against the model.

Knows the range of each option of `Config`. Does not know what an "auto" means (`devices.py`,
`gpu/attention_choice.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.gpu.attention_choice import ATTENTION_BACKENDS
from nanovllm.utils.options import choice, real_number, truth, whole_number
from nanovllm.utils.peers import own_options

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from nanovllm.utils.model_config import ModelConfig

_LEAST_LENGTH = 2  # one token in, one out
_WHOLE_NUMBERS = {  # the least, and what each is below
    **dict.fromkeys(("max_num_batched_tokens", "max_num_seqs", "tensor_parallel_size"), (1, 2**31)),
    **dict.fromkeys(("max_model_len", "kvcache_block_size", "num_kvcache_blocks"), (1, 2**31)),
    "seed": (0, 2**64),
}
_SHARES = {"gpu_memory_utilization": 1.0, "distributed_timeout": 7 * 24 * 3600.0}  # 0 to this
_SWITCHES = {"enforce_eager", "enable_prefix_caching", "fused_kernels"}
_CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float32", "float16", "bfloat16"),
    "attention_backend": ("auto", *ATTENTION_BACKENDS),
}


def checked_options(
    options: Mapping[str, Any], known: Collection[str], policies: Collection[str]
) -> dict[str, Any]:
    """Return the options of `Config`, as Python's own types.

    Raises:
        TypeError: an option is unknown, or a value is of the wrong type.
        ValueError: a value is out of range.
    """
    own = own_options("LLM()", options, known)
    return {name: _checked(name, value, policies) for name, value in own.items()}


def _checked(name: str, value: object, policies: Collection[str]) -> object:
    if name == "num_kvcache_blocks" and value is None:
        return None
    if name in _WHOLE_NUMBERS:
        at_least, below = _WHOLE_NUMBERS[name]
        number = whole_number(name, value, at_least=at_least, below=below)
        if name == "max_model_len" and number < _LEAST_LENGTH:
            raise ValueError("max_model_len must be at least 2: one prompt token and one more")
        return number
    if name in _SHARES:
        return real_number(name, value, low=0, high=_SHARES[name], with_low=False)
    if name in _SWITCHES:
        return truth(name, value)
    return choice(name, value, _CHOICES.get(name) or tuple(policies))


def check_split(num_ranks: int, model: ModelConfig) -> None:
    """Can each rank have as many attention heads, and as much of the MLP, as any other?

    Fewer KV heads than ranks are replicated, if each can have equally many copies. The vocabulary
    need not come out even: it is padded.
    """
    for name in ("num_attention_heads", "intermediate_size"):
        whole = getattr(model, name)
        if whole % num_ranks:
            raise _uneven_split(num_ranks, model, f"it does not divide {name}={whole}")
    num_kv_heads = model.num_key_value_heads
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        what = f"neither it nor num_key_value_heads={num_kv_heads} divides the other"
        raise _uneven_split(num_ranks, model, what)


def _uneven_split(num_ranks: int, model: ModelConfig, what: str) -> ValueError:
    num_heads, num_kv_heads = model.num_attention_heads, model.num_key_value_heads
    possible = [
        str(number)
        for number in range(1, num_heads + 1)
        if num_heads % number == 0
        and model.intermediate_size % number == 0
        and (num_kv_heads % number == 0 or number % num_kv_heads == 0)
    ]
    return ValueError(
        f"this model cannot be split by tensor_parallel_size={num_ranks}: {what}; "
        f"it can be split by {', '.join(possible)}"
    )
