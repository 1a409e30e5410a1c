"""Config: the engine's settings, checked. `resolve` replaces every "auto".

It has what a user may set, and each default. The rules behind "auto" are in `utils/devices.py` and
`gpu/attention_choice.py`. The names are vLLM's and nano-vllm's.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.engine.policies import POLICIES
from nanovllm.gpu.attention_choice import attention_facts, can_fuse, choose_attention
from nanovllm.utils.devices import gpu_capability, resolve_device, resolve_dtype
from nanovllm.utils.engine_options import check_split, checked_options

if TYPE_CHECKING:
    from collections.abc import Collection

    from nanovllm.utils.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of one engine.

    Attributes:
        model: folder of a Qwen3 checkpoint.
        max_num_batched_tokens: maximum number of tokens computed in one step.
        max_num_seqs: maximum number of running sequences.
        max_model_len: maximum length of prompt and completion together; lowered to the number of
            positions of the model (`ModelConfig.max_position_embeddings`) if that is less.
        gpu_memory_utilization: the fraction of the device's memory that may be in use once the KV
            cache is allocated, including what other programs use.
        tensor_parallel_size: number of processes that share the model, each with a part of every
            layer; on GPUs, each process has its own GPU.
        distributed_timeout: seconds that these processes may wait for the slowest of them.
        enforce_eager: do not use CUDA graphs.
        kvcache_block_size: tokens that a KV block holds.
        num_kvcache_blocks: number of blocks in the pool; None: computed from the memory.
        device: "cpu", "cuda", or "auto": a GPU if torch sees one.
        dtype: float32, float16, bfloat16, or "auto" (the rule is in utils/devices.py).
        attention_backend: "hybrid", "flash_attn", "triton", "sdpa", or "auto": the first of these
            that runs on this machine (gpu/attention_choice.py).
        attention_reason: why that backend; not an option, `resolve` sets it.
        fused_kernels: on a GPU, compute with the kernels of gpu/kernels instead of torch's.
        policy: what goes into a step: "prefill_first", "mixed" or "static" (engine/policies.py).
        enable_prefix_caching: share the KV blocks of equal prefixes.
        seed: a request without a seed gets one that is computed from this and its seq_id.
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
    attention_reason: str = "not_recorded"

    @classmethod
    def create(cls, model: str | Path, options: dict[str, Any]) -> Config:
        """Build a Config from keyword arguments.

        Raises:
            TypeError: an option has an unknown name, or a value of the wrong type.
            ValueError: a value is out of range.
        """
        known = [f.name for f in dataclasses.fields(cls)[1:] if f.name != "attention_reason"]
        return cls(str(Path(model).expanduser()), **checked_options(options, known, POLICIES))

    def resolve(self, model_config: ModelConfig, asked: Collection[str] = ()) -> Config:
        """Replace every "auto" by its value for this model on this machine.

        Args:
            model_config: the model.
            asked: names of the options that the user has set. If max_model_len is among them and
                must be lowered, a warning is given.

        Returns:
            The settings as the engine will use them.

        Raises:
            ValueError: the model cannot be split into `tensor_parallel_size` equal parts, or the
                device, dtype or attention backend is not available on this machine.
        """
        check_split(self.tensor_parallel_size, model_config)
        device = resolve_device(self.device)
        capability = gpu_capability(device)
        dtype = resolve_dtype(self.dtype, device, model_config.dtype, capability)
        facts = attention_facts(
            device, capability, dtype, model_config.head_dim, self.kvcache_block_size
        )
        backend, reason = choose_attention(self.attention_backend, facts)
        longest = model_config.max_position_embeddings
        if self.max_model_len > longest and "max_model_len" in asked:
            lowered = f"max_model_len={self.max_model_len} is lowered to {longest}"
            warnings.warn(f"{lowered}: the model has no more positions", stacklevel=4)
        return dataclasses.replace(
            self,
            device=device,
            dtype=dtype,
            attention_backend=backend,
            attention_reason=reason,
            fused_kernels=self.fused_kernels and device == "cuda" and can_fuse(facts),
            max_model_len=min(self.max_model_len, longest),
        )
