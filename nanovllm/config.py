"""Config: the engine's settings, checked, with every "auto" resolved.

Knows what a user may set and the rule behind each default. Does not know the checkpoint's shape
(`utils/model_config.py`) beyond what the rules ask of it. Names are vLLM's and nano-vllm's.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.engine.policies import POLICIES
from nanovllm.gpu.attention_choice import (
    ATTENTION_BACKENDS,
    attention_facts,
    can_fuse,
    choose_attention,
)
from nanovllm.utils.devices import gpu_capability, resolve_device, resolve_dtype
from nanovllm.utils.options import choice, real_number, truth, whole_number

if TYPE_CHECKING:
    from collections.abc import Collection

    from nanovllm.utils.model_config import ModelConfig

_WHOLE_NUMBERS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "tensor_parallel_size",
    "kvcache_block_size",
)
_LONGEST_TIMEOUT = 7 * 24 * 3600.0


@dataclass(slots=True)
class Config:
    """Settings of one engine.

    Attributes:
        model: folder of a Qwen3 checkpoint.
        max_num_batched_tokens: tokens computed in one step, at most.
        max_num_seqs: sequences running at once, at most.
        max_model_len: length of prompt and completion together, at most; as many as the model has
            positions for (`ModelConfig.max_position_embeddings`) if that is less.
        gpu_memory_utilization: how full the device's memory may be once the engine has its pages,
            as a share of all of it: what other programs use counts.
        tensor_parallel_size: processes that share the model, each with a part of every layer; on
            GPUs each has one of its own.
        distributed_timeout: seconds that these processes may wait for the slowest among them.
        enforce_eager: use no CUDA graphs.
        kvcache_block_size: tokens a KV page holds.
        num_kvcache_blocks: pages in the pool; None works it out from the memory.
        device: "cpu", "cuda", or "auto": a GPU if torch sees one.
        dtype: float32, float16, bfloat16, or "auto" (utils/devices.py has the rule).
        attention_backend: "hybrid", "flash_attn", "triton", "sdpa", or "auto": the first of these
            that runs here (gpu/attention_choice.py).
        attention_reason: why that one; no option, but found.
        fused_kernels: on a GPU, compute with the kernels of layers/kernels instead of torch's.
        policy: what goes into a step: "prefill_first", "mixed" or "static" (engine/policies.py).
        enable_prefix_caching: share the KV pages of equal prefixes.
        seed: requests without a seed get one made from this and their number.
    """

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int = 4096
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    distributed_timeout: float = 60.0
    enforce_eager: bool = False
    kvcache_block_size: int = 256
    num_kvcache_blocks: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    fused_kernels: bool = True
    policy: str = "prefill_first"
    enable_prefix_caching: bool = True
    seed: int = 0
    attention_reason: str = field(default="not_recorded", init=False)

    @classmethod
    def create(cls, model: str | Path, options: dict[str, Any]) -> Config:
        """Build a Config from keyword arguments.

        Raises:
            TypeError: an option has an unknown name, or a value of the wrong type.
            ValueError: a value is out of range.
        """
        known = [f.name for f in dataclasses.fields(cls) if f.init and f.name != "model"]
        for name in options:
            if name not in known:
                raise TypeError(f"LLM() has no option {name!r}; it has: {', '.join(known)}")
        config = cls(str(Path(model).expanduser()), **options)
        config._check()
        return config

    def resolve(self, model_config: ModelConfig, asked: Collection[str] = ()) -> None:
        """Replace every "auto" by what it means for this model on this machine.

        Args:
            model_config: the model.
            asked: the options that the caller's caller has set. If max_model_len is one and must
                be lowered, a warning there says so.

        Raises:
            ValueError: the model cannot be split into `tensor_parallel_size` equal parts, or the
                device, dtype or attention backend asked for is not to be had here.
        """
        _check_split(self.tensor_parallel_size, model_config)
        self.device = resolve_device(self.device)
        capability = gpu_capability(self.device)
        self.dtype = resolve_dtype(self.dtype, self.device, model_config.dtype, capability)
        facts = attention_facts(
            self.device, capability, self.dtype, model_config.head_dim, self.kvcache_block_size
        )
        chosen = choose_attention(self.attention_backend, facts)
        self.attention_backend, self.attention_reason = chosen
        self.fused_kernels &= self.device == "cuda" and can_fuse(facts)
        longest = model_config.max_position_embeddings
        if self.max_model_len > longest:
            if "max_model_len" in asked:
                lowered = f"max_model_len={self.max_model_len} is lowered to {longest}"
                warnings.warn(f"{lowered}: the model has no more positions", stacklevel=3)
            self.max_model_len = longest

    def _check(self) -> None:
        for name in _WHOLE_NUMBERS:
            value = whole_number(name, getattr(self, name), at_least=1, below=2**31)
            setattr(self, name, value)
        if self.num_kvcache_blocks is not None:
            name = "num_kvcache_blocks"
            value = whole_number(name, self.num_kvcache_blocks, at_least=1, below=2**31)
            self.num_kvcache_blocks = value
        self.seed = whole_number("seed", self.seed, at_least=0, below=2**64)
        self.gpu_memory_utilization = real_number(
            "gpu_memory_utilization", self.gpu_memory_utilization, low=0, high=1, with_low=False
        )
        self.distributed_timeout = real_number(
            "distributed_timeout",
            self.distributed_timeout,
            low=0,
            high=_LONGEST_TIMEOUT,
            with_low=False,
        )
        truth("enforce_eager", self.enforce_eager)
        truth("enable_prefix_caching", self.enable_prefix_caching)
        truth("fused_kernels", self.fused_kernels)
        self.device = choice("device", self.device, ("auto", "cpu", "cuda"))
        dtypes = ("auto", "float32", "float16", "bfloat16")
        self.dtype = choice("dtype", self.dtype, dtypes)
        backends = ("auto", *ATTENTION_BACKENDS)
        self.attention_backend = choice("attention_backend", self.attention_backend, backends)
        self.policy = choice("policy", self.policy, tuple(POLICIES))
        if self.max_model_len < 2:  # noqa: PLR2004 - one token of prompt, one of completion
            raise ValueError("max_model_len must be at least 2: one token in, one out")


def _check_split(num_ranks: int, model: ModelConfig) -> None:
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
        f"it can be by {', '.join(possible)}"
    )
