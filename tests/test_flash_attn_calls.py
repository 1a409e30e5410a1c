"""What is asked of flash-attn 2 and 3: stand-ins take just the arguments that the real ones do.

The stand-ins answer through torch's attention. (The real version 2 is tried by `make gpu`.)
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal

import pytest
import torch

from nanovllm.gpu.flash_attn_calls import FlashAttnCalls
from nanovllm.layers.attention_sdpa import SdpaBackend
from nanovllm.layers.context import Context

if TYPE_CHECKING:
    from torch import Tensor

SCALE = 0.25
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 4


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One sequence, its new tokens the last ones: (num_tokens, num_heads, head_dim)."""
    num_new, length, group = len(q), len(keys), q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    is_later = torch.arange(length) > torch.arange(length - num_new, length).unsqueeze(1)
    return torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(is_later, -torch.inf).softmax(-1), values
    )


def attend_all(
    q: Tensor, cu_q: Tensor, contexts: list[tuple[Tensor, Tensor]], scale: float
) -> Tensor:
    pieces = zip(cu_q.tolist(), cu_q.tolist()[1:], contexts, strict=False)
    return torch.cat([attend(q[a:b], keys, values, scale) for a, b, (keys, values) in pieces])


def paged(k: Tensor, v: Tensor, tables: Tensor, lens: list[int]) -> list[tuple[Tensor, Tensor]]:
    rows = zip(tables, lens, strict=True)
    return [(k[row].flatten(0, 1)[:n], v[row].flatten(0, 1)[:n]) for row, n in rows]


def varlen(  # noqa: PLR0917 - as in the package
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor | None = None,
) -> Tensor:
    lens = cu_seqlens_k.diff()
    assert causal
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(lens.max()))
    if block_table is None:
        ends = pairwise(cu_seqlens_k.tolist())
        contexts = [(k[start:stop], v[start:stop]) for start, stop in ends]
    else:
        contexts = paged(k, v, block_table, lens.tolist())
    return attend_all(q, cu_seqlens_q, contexts, softmax_scale)


def with_pages_2(  # noqa: PLR0917 - as in the package
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    assert causal
    contexts = paged(k_cache, v_cache, block_table, cache_seqlens.tolist())
    return attend_all(q.flatten(0, 1), torch.arange(len(q) + 1), contexts, softmax_scale).unsqueeze(
        1
    )


def with_pages_3(  # noqa: PLR0917 - as in the package
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor,
    softmax_scale: float,
    causal: bool,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
) -> Tensor:
    if cu_seqlens_q is None:
        return with_pages_2(q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale, causal)
    assert causal
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    contexts = paged(k_cache, v_cache, page_table, cache_seqlens.tolist())
    return attend_all(q, cu_seqlens_q, contexts, softmax_scale)


def varlen_3(  # noqa: PLR0917 - as in the package, whose older releases return the sums as well
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, None]:
    lens = (max_seqlen_q, max_seqlen_k)
    return varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *lens, softmax_scale, causal), None


@pytest.fixture(params=[2, 3], ids=["version 2", "version 3"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FlashAttnCalls:
    version: Literal[2, 3] = request.param
    name = "flash_attn" if version == 2 else "flash_attn_interface"
    package = SimpleNamespace(
        flash_attn_varlen_func=varlen if version == 2 else varlen_3,
        flash_attn_with_kvcache=with_pages_2 if version == 2 else with_pages_3,
    )
    monkeypatch.setitem(sys.modules, name, package)
    return FlashAttnCalls(version)


def make_context(new: list[int], lens: list[int], *, is_paged: bool) -> Context:
    cu_q = torch.tensor([0, *new]).cumsum(0).int()
    cu_k = torch.tensor([0, *lens]).cumsum(0).int()
    width = -(-max(lens) // BLOCK_SIZE)
    tables = torch.arange(len(lens) * width, dtype=torch.int32).view(len(lens), width)
    return Context(
        phase="prefill",
        slot_mapping=torch.zeros(sum(new), dtype=torch.int64),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max(new),
        max_seqlen_k=max(lens),
        context_lens=cu_k.diff(),
        block_tables=tables if is_paged else None,
        logits_indices=None,
    )


def random_pages(num_blocks: int) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(2, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    return keys, values


def test_a_prefill_with_nothing_cached(calls: FlashAttnCalls) -> None:
    context = make_context([5, 3], [5, 3], is_paged=False)
    q, k, v = (torch.randn(8, heads, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    expected = SdpaBackend().prefill(q, k, v, SCALE, context)
    torch.testing.assert_close(calls.prefill(q, k, v, SCALE, context), expected)


def test_a_prefill_that_reads_blocks(calls: FlashAttnCalls) -> None:
    context = make_context([5, 3], [9, 7], is_paged=True)
    q, (keys, values) = torch.randn(8, NUM_HEADS, HEAD_DIM), random_pages(6)
    expected = SdpaBackend().prefill(q, keys, values, SCALE, context)
    torch.testing.assert_close(calls.prefill(q, keys, values, SCALE, context), expected)


def test_a_decode(calls: FlashAttnCalls) -> None:
    context = make_context([1, 1, 1], [9, 1, 4], is_paged=True)
    q, (keys, values) = torch.randn(3, NUM_HEADS, HEAD_DIM), random_pages(9)
    expected = SdpaBackend().decode(q, k_cache=keys, v_cache=values, scale=SCALE, context=context)
    torch.testing.assert_close(calls.decode(q, keys, values, SCALE, context), expected)
