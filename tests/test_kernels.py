"""The Triton kernels, each beside the plain torch code that computes the same; and their grids.

What is marked `gpu` runs on a GPU alone (`make gpu`): there the plain code is the oracle, fed with
fresh random numbers, on the same machine. The grids are plain numbers and are tested anywhere.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from nanovllm.gpu.kernels.grid import (
    AttentionTiling,
    PrefillTiling,
    SplitTiling,
    attention_bytes,
    ceil_div,
    choose_attention_tiling,
    choose_prefill_tiling,
    choose_row_tiling,
    choose_skinny_tiling,
    choose_split_tiling,
    choose_workers,
    next_power_of_two,
    prefill_bytes,
    skinny_bytes,
)
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention_sdpa import SdpaBackend
from nanovllm.layers.context import Context
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sampler import Sampler, SamplingTensors
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

EPS = 1e-6
HALVES = [torch.bfloat16, torch.float16]
# of a norm of errors to a norm of numbers
ROUNDING = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
NUM_REPEATS = 3  # with new numbers each time: a race does not show every time


def kernel(module: str, name: str) -> Any:  # noqa: ANN401 -- Triton is not there on a CPU
    """Import late: this file is collected where Triton is not installed."""
    return getattr(importlib.import_module(f"nanovllm.gpu.kernels.{module}"), name)


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def norm_of(weight: Tensor) -> RMSNorm:
    norm = RMSNorm(weight.shape[0], EPS)
    norm.weight.data = weight
    return norm


def distance(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|; NaN where anything is NaN."""
    error = (found.double() - expected.double()).norm()
    return float(error / expected.double().norm())


# -- grids: anywhere ------------------------------------------------------------------------------


FOUR_BESIDE = AttentionTiling(32, 2, 7, num_neighbours=4, num_empty_tiles=2)
KIB = 1024
SHARED_MEMORY = {"T4": 64 * KIB, "A10": 99 * KIB, "A100": 163 * KIB, "H200": 227 * KIB}
H200 = SHARED_MEMORY["H200"]


@pytest.mark.parametrize(
    ("num_seqs", "num_kv_heads", "max_context", "expected"),
    [(1, 8, 4096, 66), (256, 8, 4096, 66), (256, 1, 4096, 528), (1, 8, 40, 2), (1, 1000, 1, 1)],
)
def test_as_many_workers_as_an_h200_runs_at_once_share_the_contexts(
    num_seqs: int, num_kv_heads: int, max_context: int, expected: int
) -> None:
    assert choose_workers(num_seqs, num_kv_heads, max_context, FOUR_BESIDE, 132) == expected


def test_workers_refuse_a_batch_of_nothing() -> None:
    with pytest.raises(ValueError, match=r"must be positive, not \(0, 8, 4096, 132\)"):
        choose_workers(0, 8, 4096, FOUR_BESIDE, 132)


@given(size=st.integers(1, 16384))
def test_a_row_is_multiplied_in_one_step_that_fits_in_the_registers(size: int) -> None:
    tiling = choose_row_tiling(size)
    assert size <= tiling.block_size < 2 * size
    assert tiling.block_outputs == next_power_of_two(tiling.block_outputs)
    assert tiling.block_outputs * tiling.block_size <= 128 * 32 * tiling.num_warps


@given(
    size=st.integers(1, 32768),
    num_weights=st.sampled_from([1, 2]),
    number_bytes=st.sampled_from([2, 4]),
    shared_memory_bytes=st.sampled_from([*SHARED_MEMORY.values()]),
)
def test_a_skinny_step_is_tensor_core_work_for_each_warp_and_fits(
    size: int, num_weights: int, number_bytes: int, shared_memory_bytes: int
) -> None:
    tiling = choose_skinny_tiling(size, num_weights, number_bytes, shared_memory_bytes)
    assert tiling.block_outputs in {8, 16}
    assert tiling.block_size % (16 * tiling.num_warps) == 0
    assert skinny_bytes(tiling, size, num_weights, number_bytes) <= shared_memory_bytes
    if number_bytes == 2 and shared_memory_bytes > SHARED_MEMORY["A10"]:
        assert tiling.block_size == 1024


def test_attention_steps_are_small_where_the_chip_is_crowded_or_has_no_room() -> None:
    assert choose_attention_tiling(2048, 16, 256, 132, H200) == FOUR_BESIDE
    assert choose_attention_tiling(128, 16, 256, 132, H200).block_tokens == 128
    assert choose_attention_tiling(8, 16, 256, 132, H200).block_tokens == 64
    assert choose_attention_tiling(8, 16, 256, 40, SHARED_MEMORY["T4"]).block_tokens == 32


def test_only_small_tiles_make_turning_to_another_sequence_cost_two_of_them() -> None:
    assert choose_attention_tiling(128, 16, 256, 132, H200).num_empty_tiles == 0
    assert choose_attention_tiling(8, 16, 256, 132, H200).num_empty_tiles == 0


@given(
    num_programs=st.integers(1, 5000),
    num_rows=st.sampled_from([16, 32, 64]),
    head_bytes=st.sampled_from([32, 64, 128, 256, 512, 1024]),
    shared_memory_bytes=st.sampled_from([*SHARED_MEMORY.values()]),
)
def test_attention_programs_fit_into_the_shared_memory_alone_and_side_by_side(
    num_programs: int, num_rows: int, head_bytes: int, shared_memory_bytes: int
) -> None:
    assume(num_rows == 16 or shared_memory_bytes > SHARED_MEMORY["T4"])
    assume((num_rows, head_bytes) < (64, 1024) or shared_memory_bytes > SHARED_MEMORY["A10"])
    tiling = choose_attention_tiling(num_programs, num_rows, head_bytes, 132, shared_memory_bytes)
    num_bytes = attention_bytes(num_rows, tiling.block_tokens, tiling.num_stages, head_bytes)
    assert num_bytes <= shared_memory_bytes
    assert tiling.num_neighbours <= 2 or tiling.num_neighbours * num_bytes <= shared_memory_bytes


@pytest.mark.parametrize("shared_memory_bytes", SHARED_MEMORY.values(), ids=SHARED_MEMORY)
@pytest.mark.parametrize("head_bytes", [32, 64, 128, 256, 512, 1024])
def test_a_prefills_program_fits_into_the_shared_memory(
    head_bytes: int, shared_memory_bytes: int
) -> None:
    tiling = choose_prefill_tiling(head_bytes, shared_memory_bytes)
    assert prefill_bytes(tiling, head_bytes) <= shared_memory_bytes
    if head_bytes <= 256 and shared_memory_bytes > SHARED_MEMORY["T4"]:
        assert tiling == PrefillTiling(block_rows=64, block_tokens=64, num_stages=3)


def split_tiling(
    num_rows: int, num_outputs: int, size: int, number_bytes: int = 2
) -> SplitTiling | None:
    return choose_split_tiling(num_rows, num_outputs, size, number_bytes, 132, H200)


@given(
    num_rows=st.integers(1, 256),
    num_outputs=st.integers(1, 3000),
    size=st.integers(1, 4096),
    number_bytes=st.sampled_from([2, 4]),
)
def test_the_parts_of_a_product_fit_do_not_crowd_the_chip_and_are_none_of_them_empty(
    num_rows: int, num_outputs: int, size: int, number_bytes: int
) -> None:
    tiling = split_tiling(num_rows, num_outputs, size, number_bytes)
    if tiling is None:
        return
    num_lines = tiling.block_rows + tiling.block_outputs
    num_bytes = number_bytes * num_lines * tiling.block_size * tiling.num_stages
    assert H200 // 2 < num_bytes <= H200  # one a multiprocessor
    num_blocks = ceil_div(num_rows, tiling.block_rows) * ceil_div(num_outputs, tiling.block_outputs)
    assert 1 < tiling.num_parts <= 132 // num_blocks
    assert tiling.num_parts * tiling.block_size <= size


@pytest.mark.parametrize("num_rows", [32, 100, 256])
def test_the_chip_is_filled_by_a_product_that_is_split(num_rows: int) -> None:
    tiling = split_tiling(num_rows, 1024, 3072)
    assert tiling is not None
    assert ceil_div(num_rows, tiling.block_rows) * 1024 // 64 * tiling.num_parts == 128


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "size"), [(257, 1024, 3072), (64, 152_000, 1024), (64, 6144, 1024)]
)
def test_a_large_product_is_left_to_cublas(num_rows: int, num_outputs: int, size: int) -> None:
    assert split_tiling(num_rows, num_outputs, size) is None


def test_a_product_is_split_with_fewer_loads_ahead_or_not_at_all_where_memory_is_short() -> None:
    sizes = {"num_rows": 64, "num_outputs": 1024, "size": 3072, "num_multiprocessors": 132}
    found = [
        choose_split_tiling(**sizes, number_bytes=number_bytes, shared_memory_bytes=99 * KIB)
        for number_bytes in (2, 4)
    ]
    assert found[0] is not None
    assert found[0].num_stages == 3
    assert found[1] is None


def test_the_engine_is_imported_without_triton() -> None:
    script = "import sys; sys.modules['triton'] = None; import nanovllm, nanovllm.llm"
    subprocess.run([sys.executable, "-c", script], check=True)


# -- kernels: on a GPU ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1024), (3, 100), (17, 64), (255, 4096)])
def test_add_rms_norm_is_the_plain_one(
    num_tokens: int, size: int, has_residual: bool, dtype: torch.dtype
) -> None:
    x, weight = normal(num_tokens, size, dtype=dtype), normal(size, dtype=dtype)
    residual = normal(num_tokens, size, dtype=dtype) if has_residual else None
    normed, total = kernel("norm", "add_rms_norm")(x, residual, weight, EPS)
    expected_normed, expected_total = norm_of(weight).add_and_norm(x, residual)
    assert torch.equal(total, expected_total)
    assert distance(normed, expected_normed) < ROUNDING[dtype] / 10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("num_parts", [1, 2, 8])
def test_add_rms_norm_adds_up_parts_first(num_parts: int, dtype: torch.dtype) -> None:
    parts = normal(num_parts, 70, 1000, dtype=torch.float32)
    residual, weight = normal(70, 1000, dtype=dtype), normal(1000, dtype=dtype)
    normed, total = kernel("norm", "add_rms_norm")(parts, residual, weight, EPS)
    expected_normed, expected_total = norm_of(weight).add_and_norm(parts.sum(0).to(dtype), residual)
    assert distance(total, expected_total) < ROUNDING[dtype] / 10
    assert distance(normed, expected_normed) < ROUNDING[dtype] / 10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 3072), (3, 100), (255, 1025)])
def test_silu_and_mul_is_the_plain_one(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = normal(num_tokens, 2 * size, dtype=dtype)
    found = kernel("activation", "silu_and_mul")(gate_up)
    assert distance(found, SiluAndMul()(gate_up)) < ROUNDING[dtype] / 10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [(1, 16, 8, 128), (5, 6, 2, 32), (3, 3, 1, 64), (255, 16, 8, 128)],
)
def test_qk_norm_rope_write_is_norm_then_rotation_then_write(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    with torch.device("cuda"):
        rotary = RotaryEmbedding(head_dim, 500, 10_000.0)
    q_weight, k_weight = normal(head_dim, dtype=dtype), normal(head_dim, dtype=dtype)
    qkv = normal(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    positions = torch.randint(0, 500, (num_tokens,), device="cuda")
    slot_mapping = torch.randperm(300, device="cuda")[:num_tokens]
    slot_mapping[1::7] = -1
    k_cache = normal(60, 5, num_kv_heads, head_dim, dtype=dtype)
    v_cache = normal(60, 5, num_kv_heads, head_dim, dtype=dtype)
    expected_k_cache, expected_v_cache = k_cache.clone(), v_cache.clone()
    k_out = torch.full((num_tokens, num_kv_heads, head_dim), torch.nan, dtype=dtype, device="cuda")
    found = kernel("rotary", "qk_norm_rope_write")(
        *(qkv, q_weight, k_weight, EPS, rotary.cos_sin_table, positions, slot_mapping),
        *(k_cache, v_cache, num_heads, num_kv_heads, k_out),
    )

    rotation = rotary(positions)
    heads = qkv.unflatten(-1, (-1, head_dim))  # type: ignore[no-untyped-call] # torch has no type
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    q, k = rotation.apply(norm_of(q_weight)(q)), rotation.apply(norm_of(k_weight)(k))
    is_real = slot_mapping >= 0
    SdpaBackend().write_kv(
        k[is_real], v[is_real], expected_k_cache, expected_v_cache, slot_mapping[is_real]
    )
    for ours, plain in ((found, q), (k_out, k), (k_cache, expected_k_cache)):
        assert distance(ours, plain) < ROUNDING[dtype] / 10
    assert torch.equal(v_cache, expected_v_cache)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 16])
@pytest.mark.parametrize(
    ("num_outputs", "size"),
    [(4096, 1024), (1024, 3072), (50, 96), (64, 700), (1000, 2048), (40, 6000)],
)
def test_a_skinny_product_is_norm_then_linear_then_addition(
    num_outputs: int, size: int, num_rows: int, dtype: torch.dtype
) -> None:
    x, norm_weight = normal(num_rows, size, dtype=dtype), normal(size, dtype=dtype)
    weight = normal(num_outputs, size, dtype=dtype, scale=size**-0.5)
    residual = normal(num_rows, num_outputs, dtype=dtype)
    multiply = kernel("skinny_matmul", "skinny_matmul")
    normed = norm_of(norm_weight)(x)
    expected = functional.linear(normed, weight)
    for found, plain in (
        (multiply(x, weight), functional.linear(x, weight)),
        (multiply(x, weight, norm_weight=norm_weight, eps=EPS), expected),
        (
            multiply(x, weight, norm_weight=norm_weight, eps=EPS, residual=residual),
            expected + residual,
        ),
        (
            multiply(x, weight, norm_weight=norm_weight, eps=EPS, is_gate_up=True),
            SiluAndMul()(expected),
        ),
    ):
        assert distance(found, plain) < ROUNDING[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("num_rows", [17, 64, 80, 144, 256])
@pytest.mark.parametrize(("num_outputs", "size"), [(1024, 3072), (100, 896), (66, 700)])
def test_a_split_product_is_linear_in_parts(
    num_outputs: int, size: int, num_rows: int, dtype: torch.dtype
) -> None:
    tiling = split_tiling(num_rows, num_outputs, size)
    assert tiling is not None
    for _ in range(NUM_REPEATS):
        check_split(num_rows, num_outputs, size, dtype, tiling)


@pytest.mark.gpu
@pytest.mark.parametrize("num_parts", [1, 3, 9])  # of 9, the last have nothing to do
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_a_split_product_may_be_cut_anyhow(dtype: torch.dtype, num_parts: int) -> None:
    tiling = SplitTiling(32, 16, 32, num_parts, num_warps=4, num_stages=2)
    check_split(45, 50, 192, dtype, tiling)


def check_split(
    num_rows: int, num_outputs: int, size: int, dtype: torch.dtype, tiling: SplitTiling
) -> None:
    """Multiply new numbers, and compare with the plain product."""
    x = normal(num_rows, size, dtype=dtype)
    weight = normal(num_outputs, size, dtype=dtype, scale=size**-0.5)
    parts = kernel("split_matmul", "split_matmul")(x, weight, tiling)
    assert parts.shape == (tiling.num_parts, num_rows, num_outputs)
    assert distance(parts.sum(0), functional.linear(x, weight)) < ROUNDING[dtype]


def paged(
    lens: Sequence[int], block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pages full of NaN but where the contexts lie, and their block tables."""
    width = max(ceil_div(max(lens), block_size), 1)
    tables = torch.randperm(len(lens) * width, device="cuda").int().view(len(lens), width)
    shape = (len(lens) * width, block_size, num_kv_heads, head_dim)
    k_cache = torch.full(shape, torch.nan, dtype=dtype, device="cuda")
    v_cache = k_cache.clone()
    for row, context_len in enumerate(lens):
        slots = slots_of(tables[row], context_len, block_size)
        for cache in (k_cache, v_cache):
            cache.view(-1, num_kv_heads, head_dim)[slots] = normal(
                context_len, num_kv_heads, head_dim, dtype=dtype
            )
    return k_cache, v_cache, tables


def slots_of(table: Tensor, context_len: int, block_size: int) -> Tensor:
    positions = torch.arange(context_len, device="cuda")
    return table[positions // block_size] * block_size + positions % block_size


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("block_size", [1, 5, 16, 256])
@pytest.mark.parametrize("num_copies", [1, 3, 20])  # with few rows the contexts are split
def test_paged_attention_is_the_plain_one_and_zero_for_padding(
    num_copies: int, block_size: int, dtype: torch.dtype
) -> None:
    lens = [1, 255, 256, 257, 2048][: 1 + num_copies] * num_copies
    k_cache, v_cache, tables = paged(lens, block_size, 8, 128, dtype)
    tables = torch.cat((tables, tables[:1]))  # a padding row
    context_lens = torch.tensor([*lens, 0], dtype=torch.int32, device="cuda")
    q = normal(len(lens) + 1, 16, 128, dtype=dtype)
    attend = kernel("paged_attention", "paged_attention")
    found = attend(q, k_cache, v_cache, tables, context_lens, 0.09)
    nothing = torch.tensor([0], device="cuda")
    context = Context(
        *("decode", nothing, nothing, nothing, 1, max(lens)),
        *(context_lens[:-1], tables[:-1], None),
    )
    expected = SdpaBackend().decode(
        q[:-1].float(),
        k_cache=k_cache.float(),
        v_cache=v_cache.float(),
        scale=0.09,
        context=context,
    )
    assert distance(found[:-1], expected) < ROUNDING[dtype]
    assert torch.equal(found[-1], torch.zeros_like(found[-1]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("block_size", [1, 5, 16, 256])
@pytest.mark.parametrize("num_seqs", [2, 15, 33, 150])
def test_paged_attention_shares_uneven_contexts_out_and_skips_empty_ones(
    num_seqs: int, block_size: int, dtype: torch.dtype
) -> None:
    attend = kernel("paged_attention", "paged_attention")
    for _ in range(NUM_REPEATS):
        lens = (torch.rand(num_seqs) ** 3 * 1500).int().tolist()
        lens[num_seqs // 2], lens[-1] = 0, 700  # an empty one in the middle, not only behind
        k_cache, v_cache, tables = paged(lens, block_size, 2, 64, dtype)
        context_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        q = normal(num_seqs, 4, 64, dtype=dtype)
        plan = kernel("attention_plan", "plan_attention")(context_lens, tables, k_cache, 4)
        found = attend(q, k_cache, v_cache, tables, context_lens, 0.12, plan)
        for _ in range(NUM_REPEATS):
            again = attend(q, k_cache, v_cache, tables, context_lens, 0.12)
            assert torch.equal(again, found)
        is_real = context_lens > 0
        nothing = torch.tensor([0], device="cuda")
        context = Context(
            *("decode", nothing, nothing, nothing, 1, max(lens)),
            *(context_lens[is_real], tables[is_real], None),
        )
        expected = SdpaBackend().decode(
            q[is_real].float(),
            k_cache=k_cache.float(),
            v_cache=v_cache.float(),
            scale=0.12,
            context=context,
        )
        assert distance(found[is_real], expected) < ROUNDING[dtype]
        assert not found[~is_real].any()


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [[0, 0], [1], [0, 33, 0, 4000, 1, 0], [700] * 200])
def test_a_plan_gives_each_worker_as_many_tiles_as_any_other(lens: list[int]) -> None:
    k_cache = normal(1, 256, 8, 128, dtype=torch.bfloat16)
    tables = torch.zeros(len(lens), 16, dtype=torch.int32, device="cuda")
    context_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    plan = kernel("attention_plan", "plan_attention")(context_lens, tables, k_cache, 16)
    num_empty = plan.tiling.num_empty_tiles
    num_tiles = [ceil_div(some, plan.tiling.block_tokens) + num_empty * bool(some) for some in lens]
    ends = torch.tensor(num_tiles).cumsum(0).tolist()
    assert plan.seq_ends.tolist() == ends
    runs = plan.runs.tolist()
    assert len(runs) == plan.num_workers
    assert [begin for begin, *_ in runs] == [0] + [end for _, end, *_ in runs[:-1]]
    assert runs[-1][1] == ends[-1]
    shares = [end - begin for begin, end, *_ in runs]
    busy = [share for share in shares if share]
    assert max(shares) - min(busy, default=0) <= 1
    shared: dict[int, list[int]] = {}
    for worker, (begin, end, first_seq, last_seq) in enumerate(runs):
        if begin < end:
            assert ends[first_seq] - num_tiles[first_seq] <= begin < ends[first_seq]
            assert ends[last_seq] - num_tiles[last_seq] < end <= ends[last_seq]
            for seq in range(first_seq, last_seq + 1):
                if lens[seq]:
                    shared.setdefault(seq, []).append(worker)
    expected = {w[0]: [seq, len(w)] for seq, w in shared.items() if len(w) > 1}
    found = {worker: row for worker, row in enumerate(plan.shared.tolist()) if row[1]}
    assert found == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize(("num_copies", "group"), [(1, 1), (1, 3), (1, 20), (20, 2), (80, 2)])
def test_paged_attention_packs_any_number_of_heads_of_any_size(
    num_copies: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    lens = [100, 33] * num_copies
    k_cache, v_cache, tables = paged(lens, 16, 2, head_dim, dtype)
    context_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    q = normal(len(lens), 2 * group, head_dim, dtype=dtype)
    attend = kernel("paged_attention", "paged_attention")
    found = attend(q, k_cache, v_cache, tables, context_lens, head_dim**-0.5)
    nothing = torch.tensor([0], device="cuda")
    context = Context(
        "decode", nothing, nothing, nothing, 1, 100, context_lens, tables, logits_indices=None
    )
    expected = SdpaBackend().decode(
        q.float(),
        k_cache=k_cache.float(),
        v_cache=v_cache.float(),
        scale=head_dim**-0.5,
        context=context,
    )
    assert distance(found, expected) < ROUNDING[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(
    ("block_size", "head_dim"), [(1, 128), (5, 128), (16, 128), (256, 128), (256, 256), (16, 32)]
)
def test_prefill_attention_is_the_plain_one_from_blocks_and_in_one_piece(
    block_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    new_lens, lens = [3, 1, 700, 20], [3, 640, 1000, 20]
    k_cache, v_cache, tables = paged(lens, block_size, 8, head_dim, dtype)
    q = normal(sum(new_lens), 16, head_dim, dtype=dtype)
    begins_q, begins_k = (
        torch.tensor([0, *some], device="cuda").cumsum(0).int() for some in (new_lens, lens)
    )
    slots = [slots_of(tables[row], some, block_size) for row, some in enumerate(lens)]
    k, v = (cache.view(-1, 8, head_dim)[torch.cat(slots)] for cache in (k_cache, v_cache))
    expected = torch.cat(
        [
            functional.scaled_dot_product_attention(
                q[begins_q[row] : begins_q[row + 1]].float().transpose(0, 1),
                k[begins_k[row] : begins_k[row + 1]]
                .float()
                .repeat_interleave(2, 1)
                .transpose(0, 1),
                v[begins_k[row] : begins_k[row + 1]]
                .float()
                .repeat_interleave(2, 1)
                .transpose(0, 1),
                attn_mask=torch.ones(new, whole, dtype=torch.bool, device="cuda").tril(whole - new),
                scale=0.09,
            ).transpose(0, 1)
            for row, (new, whole) in enumerate(zip(new_lens, lens, strict=True))
        ]
    )
    attend = kernel("prefill_attention", "prefill_attention")
    from_pages = attend(q, k_cache, v_cache, begins_q, begins_k, 700, 0.09, tables)
    in_one_piece = attend(q, k, v, begins_q, begins_k, 700, 0.09)
    assert torch.equal(from_pages, in_one_piece)
    assert distance(from_pages, expected) < ROUNDING[dtype]


def sampling(temperatures: list[float], seed: int) -> SamplingTensors:
    params = [SamplingParams(temperature=temperature) for temperature in temperatures]
    positions = range(len(params))
    return SamplingTensors(params, [seed + row for row in positions], positions, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(1, 151_936), (3, 5000), (255, 5001), (40, 151_936)]
)
def test_sample_draws_the_plain_samplers_tokens(
    num_rows: int, vocab_size: int, dtype: torch.dtype
) -> None:
    logits = normal(num_rows, vocab_size, dtype=dtype, scale=3.0)
    logits[-1, 7] = logits[-1, 4321] = logits[-1].max() + 1  # a tie
    some = [0.6, 1.0, 0.0, 1e-60, 1e6, 0.01]
    params = sampling([some[row % 6] for row in range(num_rows - 1)] + [0.0], 11)
    token_ids, is_finite = kernel("sampler", "sample")(
        logits, params.temperatures, params.is_greedy, params.noise_keys
    )
    assert torch.equal(token_ids, Sampler()(logits.float(), params))
    assert token_ids[-1] == 7
    assert is_finite.all()


@pytest.mark.gpu
def test_sample_says_which_rows_are_broken() -> None:
    logits = normal(12, 5000, dtype=torch.bfloat16)
    logits[0, 5] = logits[6, 5] = torch.nan
    logits[1] = logits[7] = -torch.inf
    logits[2, 3] = logits[8, 3] = torch.inf
    logits[3, 3] = logits[9, 3] = -torch.inf  # one masked token breaks nothing
    logits[4, 2048:] = logits[10, :4096] = -torch.inf  # nor do thousands in a row
    params = sampling([0.0] * 6 + [0.7] * 6, 1)
    token_ids, is_finite = kernel("sampler", "sample")(
        logits, params.temperatures, params.is_greedy, params.noise_keys
    )
    assert is_finite.tolist() == [False, False, False, True, True, True] * 2
    assert token_ids.min() >= 0
    assert token_ids.max() < 5000
    mended = torch.where(is_finite.unsqueeze(1), logits, 0.0).float()
    assert torch.equal(token_ids[is_finite], Sampler()(mended, params)[is_finite])


@pytest.mark.gpu
def test_a_captured_chain_of_kernels_gives_what_the_same_calls_give() -> None:
    """Kernels that start early must still wait: a chain of them, replayed often, never differs."""
    multiply = kernel("skinny_matmul", "skinny_matmul")
    add_rms_norm = kernel("norm", "add_rms_norm")
    weights = [normal(1024, 1024, dtype=torch.bfloat16, scale=0.03) for _ in range(20)]
    norm_weight = normal(1024, dtype=torch.bfloat16)

    def chain(x: Tensor) -> Tensor:
        stream = x
        for weight in weights:
            y = multiply(stream, weight, norm_weight=norm_weight, eps=EPS)
            stream = multiply(y, weight, residual=stream)
            stream = add_rms_norm(y, stream, norm_weight, EPS)[0]
        return stream

    for num_rows in (1, 5):
        x = normal(num_rows, 1024, dtype=torch.bfloat16)
        chain(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain(x)
        for _ in range(20):
            x.copy_(normal(num_rows, 1024, dtype=torch.bfloat16))
            graph.replay()
            assert torch.equal(found, chain(x))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [40, 200])
def test_a_captured_chain_of_split_products_gives_what_the_same_calls_give(num_rows: int) -> None:
    multiply = kernel("split_matmul", "split_matmul")
    add_rms_norm = kernel("norm", "add_rms_norm")
    weights = [normal(1024, 1024, dtype=torch.bfloat16, scale=0.03) for _ in range(20)]
    norm_weight = normal(1024, dtype=torch.bfloat16)
    tiling = split_tiling(num_rows, 1024, 1024)
    assert tiling is not None

    def chain(x: Tensor) -> Tensor:
        normed: Tensor
        normed, stream = add_rms_norm(x, None, norm_weight, EPS)
        for weight in weights:
            parts = multiply(normed, weight, tiling)
            normed, stream = add_rms_norm(parts, stream, norm_weight, EPS)
        return normed

    x = normal(num_rows, 1024, dtype=torch.bfloat16)
    chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(x)
    for _ in range(20):
        x.copy_(normal(num_rows, 1024, dtype=torch.bfloat16))
        graph.replay()
        assert torch.equal(found, chain(x))


@pytest.mark.gpu
def test_bad_shapes_are_refused_with_the_numbers() -> None:
    x = normal(17, 64, dtype=torch.bfloat16)
    multiply = kernel("skinny_matmul", "skinny_matmul")
    with pytest.raises(ValueError, match="at most 16 rows, not 17"):
        multiply(x, normal(8, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"weight must have the shape \(any, 64\), not \(8, 65\)"):
        multiply(x[:2], normal(8, 65, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"x is torch.bfloat16, weight is torch.float16"):
        multiply(x[:2], normal(8, 64, dtype=torch.float16))
    with pytest.raises(ValueError, match="x in parts needs a residual"):
        kernel("norm", "add_rms_norm")(
            normal(2, 17, 64, dtype=torch.float32), None, x[0].contiguous(), EPS
        )
    with pytest.raises(ValueError, match="x must be contiguous"):
        kernel("norm", "add_rms_norm")(x.T, None, normal(17, dtype=torch.bfloat16), EPS)
