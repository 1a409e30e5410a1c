"""What an attention backend is, which one runs here, and why that one.

    hybrid        flash-attn for prefills, this project's kernels for decodes, faster there
    flash_attn    the flash-attn package for both
    triton        this project's own kernels (gpu/kernels) for both: any GPU that Triton knows
    sdpa          torch's attention over gathered pages: anywhere, and the oracle of the others

Knows what each of them needs, as one table of questions. What is installed is asked of the machine
by `attention_facts`, once; the choice is a pure function.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, Protocol

from nanovllm.errors import AttentionBackendError
from nanovllm.gpu.flash_attn_calls import flash_attn_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from nanovllm.layers.context import Context

ATTENTION_BACKENDS = ("hybrid", "flash_attn", "triton", "sdpa")

FLASH_BLOCK_MULTIPLE = 256  # tokens: flash-attn 2 reads pages of such sizes
FLASH_CAPABILITY = (8, 0)
TRITON_CAPABILITY = (7, 0)
MAX_HEAD_DIM = 256


class AttentionBackend(Protocol):
    """One way to compute paged attention. It keeps nothing from one call to the next.

    What all layers of a step share it may leave in `context.plan`.
    """

    @property
    def name(self) -> str:
        """The word that chooses this backend."""
        ...

    def write_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write (num_tokens, num_kv_heads, head_dim) keys and values into their slots."""
        ...

    def prefill(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, context: Context
    ) -> Tensor:
        """Attend from any number of new tokens a sequence to its whole context, causally.

        The new tokens are the last of the context. Where `context.block_tables` is None they are
        all of it, and `keys` and `values` are theirs, (num_tokens, num_kv_heads, head_dim). Else
        these are the cache's blocks, and the new tokens' are written there already.

        Returns:
            (num_tokens, num_heads, head_dim), as `q` is.
        """
        ...

    def decode(
        self, q: Tensor, *, k_cache: Tensor, v_cache: Tensor, scale: float, context: Context
    ) -> Tensor:
        """Attend from one new token a sequence, already written, to its whole context.

        Returns:
            (num_seqs, num_heads, head_dim), as `q` is.
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What the choice depends on.

    Attributes:
        device_type: "cpu" or "cuda".
        capability: the GPU's compute capability; (0, 0) for a CPU.
        dtype: of the keys and values.
        head_dim: numbers in a head.
        block_size: tokens in a KV page.
        flash_attn: the version that is installed for such a GPU, 2 or 3; None for none.
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
    """Add what is installed to what is known."""
    known = (device_type, capability, dtype, head_dim, block_size)
    has_triton = find_spec("triton") is not None
    return AttentionFacts(*known, flash_attn_version(capability), has_triton)


def choose_attention(asked: str, facts: AttentionFacts) -> tuple[str, str]:
    """Choose a backend.

    Args:
        asked: one of ATTENTION_BACKENDS, or "auto" for the first of them that runs here.
        facts: about machine and model.

    Returns:
        Its name, and the reason: "asked", or "first_choice", or what the faster one lacks.

    Raises:
        AttentionBackendError: the one that was asked for cannot run here.
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
    chosen = next(name for name, obstacle in obstacles.items() if obstacle is None)  # sdpa at last
    return chosen, obstacles[ATTENTION_BACKENDS[0]] or "first_choice"


def make_attention_backend(name: str) -> AttentionBackend:
    """Return the backend of that name.

    Raises:
        ValueError: there is none of that name.
    """
    # Imported here: Triton and flash-attn are on a GPU user's machine only.
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
    """Can the model run through the kernels of gpu/kernels? They ask what attention's do."""
    return _obstacle("triton", facts) is None


def _obstacle(name: str, facts: AttentionFacts) -> str | None:
    """Return the first need of a backend that is not met."""
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
        "triton_missing": facts.has_triton,  # it writes K and V into the pages
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
