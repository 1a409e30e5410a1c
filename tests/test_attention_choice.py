"""Which attention backend, data type and device an "auto" means, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanovllm.errors import AttentionBackendError
from nanovllm.gpu.attention_choice import (
    ATTENTION_BACKENDS,
    AttentionFacts,
    can_fuse,
    choose_attention,
    make_attention_backend,
)
from nanovllm.gpu.flash_attn_calls import flash_attn_version
from nanovllm.parallel.ranks import rank_device
from nanovllm.utils.devices import resolve_device, resolve_dtype

HOPPER = AttentionFacts(
    device_type="cuda",
    capability=(9, 0),
    dtype="bfloat16",
    head_dim=128,
    block_size=256,
    flash_attn=2,
    has_triton=True,
)
T4 = replace(HOPPER, capability=(7, 5), dtype="float16")
CPU = replace(HOPPER, device_type="cpu", capability=(0, 0), dtype="float32")


@pytest.mark.parametrize(
    ("facts", "name", "reason"),
    [
        (HOPPER, "hybrid", "first_choice"),
        (replace(HOPPER, flash_attn=None), "triton", "flash_attn_missing"),
        (replace(HOPPER, dtype="float32"), "triton", "needs_16_bit"),
        (replace(HOPPER, block_size=16), "triton", "needs_pages_of_256"),
        (replace(HOPPER, head_dim=80), "flash_attn", "head_dim_unsupported"),
        (replace(HOPPER, has_triton=False), "sdpa", "triton_missing"),
        (T4, "triton", "gpu_too_old"),
        (replace(T4, capability=(6, 1)), "sdpa", "gpu_too_old"),
        (replace(T4, has_triton=False), "sdpa", "gpu_too_old"),
        (CPU, "sdpa", "no_gpu"),
    ],
)
def test_auto_takes_the_first_that_runs_and_says_what_the_faster_one_lacks(
    facts: AttentionFacts, name: str, reason: str
) -> None:
    assert choose_attention("auto", facts) == (name, reason)


@pytest.mark.parametrize("name", ATTENTION_BACKENDS)
def test_what_was_asked_for_is_taken_where_it_runs(name: str) -> None:
    assert choose_attention(name, HOPPER) == (name, "asked")


@pytest.mark.parametrize(
    ("asked", "facts", "words"),
    [
        ("flash_attn", CPU, "the device is cpu"),
        ("triton", CPU, "need a GPU"),
        ("hybrid", T4, "compute capability 7.5"),
        ("flash_attn", replace(HOPPER, flash_attn=None), "pip install flash-attn"),
        ("flash_attn", replace(HOPPER, dtype="float32"), "float16 or bfloat16, not float32"),
        ("flash_attn", replace(HOPPER, block_size=16), "multiple of 256, not 16"),
        ("triton", replace(HOPPER, head_dim=80), "head_dim=80"),
        ("triton", replace(HOPPER, has_triton=False), "triton is not installed"),
        ("flash_attn", replace(HOPPER, has_triton=False), "triton is not installed"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason_and_a_way_out(
    asked: str, facts: AttentionFacts, words: str
) -> None:
    with pytest.raises(AttentionBackendError, match="use attention_backend='auto'") as caught:
        choose_attention(asked, facts)
    assert words in str(caught.value)


def test_the_models_own_kernels_ask_for_a_gpu_and_triton() -> None:
    assert can_fuse(HOPPER)
    assert can_fuse(T4)
    assert not can_fuse(CPU)
    assert not can_fuse(replace(HOPPER, has_triton=False))


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(ValueError, match="no attention backend 'fast'"):
        make_attention_backend("fast")


@pytest.mark.parametrize(
    ("device", "stored", "capability", "dtype"),
    [
        ("cpu", "bfloat16", (0, 0), "float32"),
        ("cuda", "bfloat16", (9, 0), "bfloat16"),
        ("cuda", "float16", (9, 0), "float16"),
        ("cuda", "float32", (9, 0), "bfloat16"),
        ("cuda", None, (8, 0), "bfloat16"),
        ("cuda", "bfloat16", (7, 5), "float16"),
        ("cuda", None, (7, 5), "float16"),
    ],
)
def test_an_auto_dtype_is_the_checkpoints_own_where_the_gpu_can(
    device: str, stored: str | None, capability: tuple[int, int], dtype: str
) -> None:
    assert resolve_dtype("auto", device, stored, capability) == dtype


def test_a_dtype_that_was_asked_for_is_taken_or_refused() -> None:
    assert resolve_dtype("float32", "cuda", "bfloat16", (7, 5)) == "float32"
    assert resolve_dtype("bfloat16", "cpu", None, (0, 0)) == "bfloat16"
    with pytest.raises(ValueError, match="use dtype='float16'"):
        resolve_dtype("bfloat16", "cuda", None, (7, 5))


def test_a_gpu_is_taken_where_there_is_one_and_refused_where_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [resolve_device(asked) for asked in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ValueError, match="use device='cpu'"):
        resolve_device("cuda")


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(rank_device("cuda", rank)) for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    assert str(rank_device("cpu", 7)) == "cpu"
    with pytest.raises(ValueError, match=r"rank 2 .* no GPU, .* torch sees only 2: set tensor_p"):
        rank_device("cuda", 2)


@pytest.mark.parametrize(
    ("installed", "on_hopper", "on_ampere"),
    [
        (set(), None, None),
        ({"flash_attn"}, 2, 2),
        ({"flash_attn_interface"}, 3, None),
        ({"flash_attn", "flash_attn_interface"}, 3, 2),
    ],
)
def test_flash_attn_3_is_taken_on_a_hopper_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
    installed: set[str],
    on_hopper: int | None,
    on_ampere: int | None,
) -> None:
    monkeypatch.setattr(
        "nanovllm.gpu.flash_attn_calls.find_spec", lambda name: name in installed or None
    )
    assert flash_attn_version((9, 0)) == on_hopper
    assert flash_attn_version((8, 0)) == on_ampere
