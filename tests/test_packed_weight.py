"""Packed weights and thread counts: faster, and the same numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from nanovllm.layers.context import Context, forward_context
from nanovllm.layers.embed_head import LMHead
from nanovllm.layers.linear import Linear, MergedLinear, RowLinear
from nanovllm.layers.packed_weight import PackedWeight
from nanovllm.parallel.tensor_parallel import ALONE
from nanovllm.utils.threads import is_worth_sharing, threads_for

if TYPE_CHECKING:
    from collections.abc import Callable


def filled(layer: Linear) -> Linear:
    layer.weight.copy_(torch.randn_like(layer.weight))
    return layer


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 33, 200])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Linear(48, 130),
        lambda: MergedLinear(64, {"q_proj": ALONE.split(0, 64), "k_proj": ALONE.split(0, 32)}),
        lambda: RowLinear(96, 40, ALONE),
    ],
    ids=["linear", "several", "row"],
)
def test_a_packed_weight_multiplies_as_the_plain_one(
    make: Callable[[], Linear], num_tokens: int
) -> None:
    layer = filled(make())
    x = torch.randn(num_tokens, layer.weight.shape[1])
    expected = functional.linear(x.double(), layer.weight.double())
    pays = PackedWeight.pays(layer.weight)  # not on a torch without oneDNN
    layer.pack()
    assert (layer.packed is not None) == pays
    error = (layer(x).double() - expected).norm() / expected.norm()
    assert error < 1e-6


def test_packing_gives_the_plain_weights_memory_back_and_keeps_their_shape() -> None:
    layer = filled(Linear(8, 6))
    pays = PackedWeight.pays(layer.weight)
    layer.pack()
    assert layer.weight.is_meta == pays
    assert layer.weight.shape == (6, 8)


def test_the_head_keeps_its_weight_which_may_be_the_embeddings_own() -> None:
    head = LMHead(10, 8)
    head.weight.copy_(torch.randn(10, 8))
    x = torch.randn(3, 8)
    nothing = torch.zeros(4, dtype=torch.int32)
    context = Context(
        phase="decode",
        slot_mapping=nothing,
        cu_seqlens_q=nothing,
        cu_seqlens_k=nothing,
        max_seqlen_q=1,
        max_seqlen_k=1,
        context_lens=nothing,
        block_tables=None,
        logits_indices=None,
    )
    with forward_context(context):
        plain = head(x)
        head.pack()
        torch.testing.assert_close(head(x), plain)
    assert not head.weight.is_meta


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_weights_stay_plain(dtype: torch.dtype) -> None:
    layer = filled(Linear(8, 6)).to(dtype)
    layer.pack()
    assert layer.packed is None
    assert not PackedWeight.pays(layer.weight)
    assert layer(torch.ones(2, 8, dtype=dtype)).shape == (2, 6)


def test_small_products_are_computed_by_one_thread_and_the_count_comes_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads_for(num_rows=2, num_weights=1000):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with threads_for(num_rows=2, num_weights=10_000_000):
            assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError), threads_for(num_rows=2, num_weights=1000):
            _ = 1 / 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_more_rows_or_more_weights_make_a_product_worth_sharing() -> None:
    assert not is_worth_sharing(num_rows=1, num_weights=330_000)
    assert is_worth_sharing(num_rows=1, num_weights=1_500_000)  # read by two, not by one
    assert is_worth_sharing(num_rows=200, num_weights=330_000)
