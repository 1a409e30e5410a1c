"""The choice of an attention backend (`layers/attention.py`) for a machine and a model.

    hybrid        flash-attn for prefills, this project's kernels (faster there) for decodes
    flash_attn    the flash-attn package for both
    triton        this project's kernels (gpu/kernels) for both: on any GPU that Triton supports
    sdpa          torch's attention over gathered blocks: on any device; the oracle of the others

`attention_facts` finds out what is installed; from that, the choice is a pure function.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from nanovllm.errors import AttentionBackendError
from nanovllm.gpu.flash_attn_calls import flash_attn_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanovllm.layers.attention import AttentionBackend

ATTENTION_BACKENDS = ("hybrid", "flash_attn", "triton", "sdpa")

FLASH_BLOCK_MULTIPLE = 256  # flash-attn 2 needs a block size that is a multiple of this
FLASH_CAPABILITY = (8, 0)
TRITON_CAPABILITY = (7, 0)
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What the choice depends on.

    Attributes:
        device_type: "cpu" or "cuda".
        capability: the GPU's compute capability; (0, 0) for a CPU.
        dtype: of the keys and values.
        head_dim: size of a head.
        block_size: tokens in a KV block.
        flash_attn: the installed version for such a GPU, 2 or 3; None if there is none.
        has_triton: is the package installed?
    """

    device_type: str
    capability: tuple[int, int]
    dtype: str
    head_dim: int
    block_size: int
    flash_attn: Literal[2, 3] | None
    has_triton: bool


def attention_facts(
    device_type: str, capability: tuple[int, int], dtype: str, head_dim: int, block_size: int
) -> AttentionFacts:
    """Return these facts, together with what is installed."""
    known = (device_type, capability, dtype, head_dim, block_size)
    has_triton = find_spec("triton") is not None
    return AttentionFacts(*known, flash_attn_version(capability), has_triton)


def choose_attention(asked: str, facts: AttentionFacts) -> tuple[str, str]:
    """Choose a backend.

    Args:
        asked: one of ATTENTION_BACKENDS, or "auto" for the first of them that can run.
        facts: about machine and model.

    Returns:
        Its name, and the reason: "asked", "first_choice", or why the first choice cannot run.

    Raises:
        AttentionBackendError: the requested one cannot run on this machine or with this model.
    """
    if asked != "auto":
        obstacle = _obstacle(asked, facts)
        if obstacle is not None:
            raise AttentionBackendError(
                f"attention_backend={asked!r} cannot run here: {_SENTENCES[obstacle](facts)}; "
                "use attention_backend='auto'"
            )
        return asked, "asked"
    obstacles = {name: _obstacle(name, facts) for name in ATTENTION_BACKENDS}
    chosen = next(name for name, obstacle in obstacles.items() if obstacle is None)
    return chosen, obstacles[ATTENTION_BACKENDS[0]] or "first_choice"


def make_attention_backend(name: str) -> AttentionBackend:
    """Return the backend of that name.

    Raises:
        ValueError: there is none of that name.
    """
    # Imported here, because Triton and flash-attn are installed on GPU machines only.
    if name == "sdpa":
        from nanovllm.layers.attention_sdpa import SdpaBackend  # noqa: PLC0415 - imports torch

        return SdpaBackend()
    if name == "triton":
        from nanovllm.gpu.attention_triton import TritonBackend  # noqa: PLC0415

        return TritonBackend()
    if name not in {"flash_attn", "hybrid"}:
        raise ValueError(f"there is no attention backend {name!r}")
    from nanovllm.gpu.attention_flash import FlashAttentionBackend, HybridBackend  # noqa: PLC0415

    return HybridBackend() if name == "hybrid" else FlashAttentionBackend()


def can_fuse(facts: AttentionFacts) -> bool:
    """Can the model run with the kernels of gpu/kernels? Their needs are those of "triton"."""
    return _obstacle("triton", facts) is None


def _obstacle(name: str, facts: AttentionFacts) -> str | None:
    """Return the code of the first need of a backend that is not met; None if all are."""
    if name == "sdpa":
        return None
    if facts.device_type != "cuda":
        return "no_gpu"
    needs_of_flash_attn = {
        "flash_attn_missing": facts.flash_attn is not None,
        "gpu_too_old": facts.capability >= FLASH_CAPABILITY,
        "needs_16_bit": facts.dtype in {"float16", "bfloat16"},
        "needs_pages_of_256": facts.block_size % FLASH_BLOCK_MULTIPLE == 0,
        "head_dim_unsupported": facts.head_dim <= MAX_HEAD_DIM and facts.head_dim % 8 == 0,
        "triton_missing": facts.has_triton,  # a Triton kernel writes K and V into the blocks
    }
    needs_of_triton = {
        "triton_missing": facts.has_triton,
        "gpu_too_old": facts.capability >= TRITON_CAPABILITY,
        "head_dim_unsupported": facts.head_dim in (16, 32, 64, 128, 256),
    }
    needs = {
        "hybrid": [*needs_of_flash_attn.items(), *needs_of_triton.items()],
        "flash_attn": [*needs_of_flash_attn.items()],
        "triton": [*needs_of_triton.items()],
    }
    return next((code for code, is_met in needs[name] if not is_met), None)


_SENTENCES: dict[str, Callable[[AttentionFacts], str]] = {
    "no_gpu": lambda facts: f"the device is {facts.device_type}, and its kernels need a GPU",
    "triton_missing": lambda _facts: "triton is not installed",
    "flash_attn_missing": lambda _facts: "flash-attn is not installed (pip install flash-attn)",
    "gpu_too_old": lambda facts: "the GPU has compute capability {}.{}".format(*facts.capability),
    "needs_16_bit": lambda facts: f"it needs float16 or bfloat16, not {facts.dtype}",
    "needs_pages_of_256": lambda facts: (
        f"it needs kvcache_block_size to be a multiple of 256, not {facts.block_size}"
    ),
    "head_dim_unsupported": lambda facts: f"it has no kernel for head_dim={facts.head_dim}",
}
