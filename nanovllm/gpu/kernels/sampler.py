"""sample: samples one token for each row of the logits, and reads the logits once.

        logits   [ chunk 0 | chunk 1 | ... ]    one program a chunk: logit / temperature + noise,
                     v         v                and of these the largest, the chunk's candidate
                   index     index   ...
                     '----v----'
                        token                   one program a row: the candidates again, exactly

The noise is that of `gumbel_noise`: the same hash, the same uniform numbers. In float64, its two
logarithms for each of 150,000 tokens would be most of the work. So the hardware's fast logarithm is
used, whose error is below `MARGIN`: if only one token of a chunk is within `MARGIN` of the largest,
it is the candidate. If several are (in one of some thousand chunks), the chunk is computed again in
float64.

There is no top-k and top-p. Inside a captured graph no error can be raised for broken logits, so
they are reported in a tensor.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Triton has no types, and types a kernel's arguments itself.

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from nanovllm.gpu.kernels.grid import ceil_div, next_power_of_two
from nanovllm.gpu.kernels.launch import (
    early_start,
    let_next_start,
    require_shape,
    wait_for_previous,
)

CHUNK = 2048
SHIFT = tl.constexpr(2**16)  # with it, a sum over 2048 places stays below 2**31
MARGIN = tl.constexpr(1e-4)  # ten times the error of a score with the fast logarithm
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
HUGE = tl.constexpr(torch.finfo(torch.float32).max)
LOG_2 = tl.constexpr(0.6931471805599453)
HALF_RANGE = tl.constexpr(2**31)
SMALL = tl.constexpr(1 / 64)


def sample(
    logits: Tensor, temperatures: Tensor, is_greedy: Tensor, noise_keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample one token for each row. The oracle is `Sampler`, for rows without top-k and top-p.

    If two scores differ only by rounding, the two may choose different tokens.

    Args:
        logits: (num_rows, vocab_size), of any floating-point dtype, each row contiguous.
        temperatures: (num_rows,) float32.
        is_greedy: (num_rows,) bool: take the largest logit, the first of equals.
        noise_keys: (2, num_rows) int64, the lower and upper 32 bits of each row's key.

    Returns:
        The tokens, (num_rows,) int64; and (num_rows,) bool, False if the row has no finite maximum:
        its token must not be used.

    Raises:
        ValueError: a shape does not fit.
    """
    if logits.dim() != 2 or logits.stride(-1) != 1:  # noqa: PLR2004 -- a table
        raise ValueError(
            f"logits must be (num_rows, vocab_size) with rows in one piece, not of the shape "
            f"{tuple(logits.shape)} and the strides {logits.stride()}."
        )
    num_rows, vocab_size = logits.shape
    require_shape((num_rows,), temperatures=temperatures, is_greedy=is_greedy)
    require_shape((2, num_rows), noise_keys=noise_keys)
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    is_finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    if not num_rows:
        return token_ids, is_finite
    num_chunks = ceil_div(vocab_size, CHUNK)
    largest = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    candidates = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    rows = (logits, logits.stride(0), temperatures, is_greedy, noise_keys, num_rows)
    _find_candidates[(num_chunks, num_rows)](
        *rows,
        vocab_size,
        largest,
        candidates,
        block=CHUNK,
        has_quick_log=device.type == "cuda",
        **early_start(device),
    )
    _choose[(num_rows,)](
        *rows,
        num_chunks,
        largest,
        candidates,
        token_ids,
        is_finite,
        block=next_power_of_two(num_chunks),
        num_warps=1,
        **early_start(device),
    )
    return token_ids, is_finite


@triton.jit
def _find_candidates(
    logits,
    row_stride,
    temperatures,
    is_greedy,
    noise_keys,
    num_rows,
    vocab_size,
    largest,
    candidates,
    block: tl.constexpr,
    has_quick_log: tl.constexpr,
    is_early: tl.constexpr,
):
    let_next_start(is_early)
    wait_for_previous(is_early)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    indices = chunk * block + tl.arange(0, block)
    logit = tl.load(
        logits + row * row_stride + indices, mask=indices < vocab_size, other=-float("inf")
    ).to(tl.float32)
    is_number = logit == logit  # noqa: PLR0124 -- NaN is not
    logit = tl.where(is_number, logit, float("inf"))  # the second kernel checks for infinities
    chunk_largest = tl.max(logit, axis=0)
    # The largest is subtracted, so that even a tiny temperature does not make it infinite.
    difference = logit - chunk_largest
    places = tl.arange(0, block)
    if tl.load(is_greedy + row) != 0:
        best = tl.min(tl.where(difference == 0.0, places, block), axis=0)
    else:
        temperature = _clamp(tl.load(temperatures + row))
        x = _hash(indices, noise_keys + row, num_rows)
        num_close, best = block, block
        if has_quick_log:
            scores = difference * (1.0 / temperature) + _quick_noise(x)
            is_close = scores > tl.max(scores, axis=0) - MARGIN
            # One sum for both: how many are close, and the place, which is right if only one is.
            counted = tl.sum(tl.where(is_close, SHIFT + places, 0), axis=0)
            num_close, best = counted // SHIFT, counted % SHIFT
        if num_close != 1:
            scores = difference / temperature + _noise(x)
            best = tl.argmax(scores, axis=0, tie_break_left=True)
    num_real = tl.minimum(vocab_size - chunk * block, block)
    best = tl.minimum(best, num_real - 1)  # none was found if all are -inf or some are not finite
    place = row * tl.num_programs(0) + chunk
    tl.store(largest + place, chunk_largest)
    tl.store(candidates + place, chunk * block + best)


@triton.jit
def _choose(
    logits,
    row_stride,
    temperatures,
    is_greedy,
    noise_keys,
    num_rows,
    num_chunks,
    largest,
    candidates,
    token_ids,
    is_finite,
    block: tl.constexpr,
    is_early: tl.constexpr,
):
    let_next_start(is_early)
    wait_for_previous(is_early)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, block)
    is_in = chunks < num_chunks
    place = row * num_chunks + chunks
    indices = tl.load(candidates + place, mask=is_in, other=0)
    row_largest = tl.max(tl.load(largest + place, mask=is_in, other=-float("inf")), axis=0)
    logit = tl.load(logits + row * row_stride + indices, mask=is_in, other=-float("inf"))
    logit = logit.to(tl.float32)
    scores = logit
    if tl.load(is_greedy + row) == 0:
        temperature = _clamp(tl.load(temperatures + row))
        noise = _noise(_hash(indices, noise_keys + row, num_rows))
        scores = (logit - row_largest) / temperature + noise
    best = tl.minimum(tl.argmax(scores, axis=0, tie_break_left=True), num_chunks - 1)
    tl.store(token_ids + row, tl.load(candidates + row * num_chunks + best).to(tl.int64))
    tl.store(is_finite + row, tl.abs(row_largest) < float("inf"))


@triton.jit
def _clamp(temperature):
    """A temperature of 1e-60 is 0 in float32, and one of 1e300 is infinite: clamp it."""
    return tl.minimum(tl.maximum(temperature, TINY), HUGE)


@triton.jit
def _hash(indices, noise_key, num_rows):
    """Return 32 bits for each index, the same as in `gumbel_noise`, in 32-bit arithmetic."""
    lower, upper = tl.load(noise_key).to(tl.uint32), tl.load(noise_key + num_rows).to(tl.uint32)
    return _mix(_mix(indices.to(tl.uint32) ^ lower) ^ upper)


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(x):
    """-log(-log(u)) of u = (x + 0.5) / 2**32, computed in float64 as in `gumbel_noise`."""
    uniform = (x.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _quick_noise(x):
    """The same with an error below 1e-5. For u near 1, 1 - u is used, which is exact."""
    is_upper = x >= HALF_RANGE
    short = tl.where(is_upper, x ^ 0xFFFFFFFF, x)  # the distance of u to 0 or 1, the nearer one
    short = (short.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    log = -LOG_2 * _quick_log2(tl.where(is_upper, 1.0 - short, short))
    series = short + short * short * (0.5 + short * 0.33333334)  # -log(1 - short) of a small number
    return -LOG_2 * _quick_log2(tl.where(is_upper & (short < SMALL), series, log))


@triton.jit
def _quick_log2(x):
    return tl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
