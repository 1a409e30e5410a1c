"""How work is cut into programs: plain numbers, decided on the host before anything is launched.

A captured graph launches the same grid for ever. So nothing here may depend on what the host does
not know at capture: the lengths of the contexts are read on the device.

Knows no tensor and no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_TOKENS_A_WORKER = 32  # less, and a program ends before its loads have got going
MAX_NEIGHBOURS = 4  # attention's programs a multiprocessor: more have no registers
SOME_MORE_BYTES = 6 * 1024  # that a program of attention takes beside what it loads ahead
SHORT_ROW = 2048  # of a weight: 16 of them fit in the registers of a program
SOME_SHARED_MEMORY = 96 * 1024  # a program's on an A10; a T4 has 64 KiB
LARGE_SHARED_MEMORY = 160 * 1024  # a program's on an A100 or better
MIN_SPLIT_BLOCK = 64  # rows: the least that Hopper's tensor cores multiply at once
MAX_SPLIT_ROWS = 256
MAX_SPLIT_WEIGHT = 8 * 1024 * 1024  # numbers: with larger weights an early start matters less


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a matrix product is cut.

    Attributes:
        block_outputs: rows of the weight a program.
        block_size: columns of the weight a step of the program's loop.
        num_warps: of a program, 32 threads each.
    """

    block_outputs: int
    block_size: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class SplitTiling:
    """How a matrix product with some dozens of rows is cut.

    Attributes:
        block_rows: rows of `x` a program.
        block_outputs: rows of the weight a program.
        block_size: columns of both a step of the program's loop.
        num_parts: into which the columns are cut, a program each.
        num_warps: of a program, 32 threads each.
        num_stages: steps that are loaded ahead of the arithmetic, and the one at work.
    """

    block_rows: int
    block_outputs: int
    block_size: int
    num_parts: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """How a share of a context is cut.

    Attributes:
        block_tokens: keys a step of the program's loop.
        num_warps: of a program, 32 threads each.
        num_stages: how far the loads are ahead of the arithmetic: 3, 5, 7 mean 1, 2, 3 steps
            (each has two kinds of loads, the page's number and then what is on it).
        num_neighbours: programs that share a multiprocessor.
    """

    block_tokens: int
    num_warps: int
    num_stages: int
    num_neighbours: int


def next_power_of_two(size: int) -> int:
    """Return the smallest power of two that is not below `size` (1 for 0)."""
    return 1 << max(size - 1, 0).bit_length()


def ceil_div(size: int, part: int) -> int:
    """Return how many parts of that size hold `size`."""
    return -(-size // part)


def choose_workers(
    num_seqs: int,
    num_kv_heads: int,
    max_context: int,
    tiling: AttentionTiling,
    num_multiprocessors: int,
) -> int:
    """Return among how many workers the contexts of a decode step are shared out.

    A worker is one program for each KV head. There are as many as the chip runs at once, so that
    all start together, and since their shares are equal, all end together.

    Args:
        num_seqs: rows of the step, padding included.
        num_kv_heads: of this rank.
        max_context: the longest context there can be, in tokens.
        tiling: of the programs.
        num_multiprocessors: of the GPU.

    Returns:
        At least 1, and no more than there can be work for.

    Raises:
        ValueError: a number is not positive.
    """
    numbers = (num_seqs, num_kv_heads, max_context, num_multiprocessors)
    if min(numbers) < 1:
        raise ValueError(
            "num_seqs, num_kv_heads, max_context and num_multiprocessors must be positive, "
            f"not {numbers}."
        )
    most = num_seqs * ceil_div(max_context, MIN_TOKENS_A_WORKER)
    return max(min(num_multiprocessors * tiling.num_neighbours // num_kv_heads, most), 1)


def choose_attention_tiling(
    num_programs: int, head_bytes: int, num_multiprocessors: int, shared_memory_bytes: int
) -> AttentionTiling:
    """Return the steps of a decode step's attention.

    Where several programs share a multiprocessor, small steps of many keep the memory busy. There
    must be just as many as fit: with fewer, one multiprocessor gets more of them than another, and
    the equal shares of its programs take longer. Where each is alone, it must ask for more at a
    time, if there is room for it. (Where only one fits, two of small steps take turns.)

    Args:
        num_programs: sequences times KV heads.
        head_bytes: one token's key of one head.
        num_multiprocessors: of the GPU.
        shared_memory_bytes: that one program may take.
    """
    if num_programs > num_multiprocessors or shared_memory_bytes < LARGE_SHARED_MEMORY:
        bytes_ahead = 3 * 32 * 2 * head_bytes  # steps, tokens, key and value
        num_neighbours = shared_memory_bytes // (bytes_ahead + SOME_MORE_BYTES)
        return AttentionTiling(
            *(32, 2, 7), num_neighbours=max(min(num_neighbours, MAX_NEIGHBOURS), 2)
        )
    if 2 * num_programs > num_multiprocessors:
        return AttentionTiling(block_tokens=128, num_warps=4, num_stages=5, num_neighbours=1)
    return AttentionTiling(block_tokens=64, num_warps=4, num_stages=9, num_neighbours=1)


def choose_row_tiling(size: int) -> Tiling:
    """Return the tiling of a product with one row, which is done in one step.

    Few rows of the weight a program: many small programs start one after another, and so the first
    ones of a kernel find room while the kernel before it still runs.
    """
    block_size = next_power_of_two(size)
    block_outputs = max(min(4, 16384 // block_size), 1)  # more would not fit in the registers
    return Tiling(block_outputs, block_size, num_warps=4)


def choose_skinny_tiling(size: int, num_weights: int, shared_memory_bytes: int) -> Tiling:
    """Return the tiling of a product with 2 to 16 rows.

    Args:
        size: of a row of the weight.
        num_weights: 2 where gate and up are done at once, else 1.
        shared_memory_bytes: that one program may take.
    """
    if shared_memory_bytes < SOME_SHARED_MEMORY:
        return Tiling(block_outputs=8, block_size=512, num_warps=4)
    block_outputs = 8 if num_weights > 1 or size > SHORT_ROW else 16
    return Tiling(block_outputs, block_size=1024, num_warps=4)


def choose_split_tiling(
    num_rows: int, num_outputs: int, size: int, num_multiprocessors: int
) -> SplitTiling | None:
    """Return how to split a product with some dozens of rows, None where cuBLAS is faster.

    Each program takes more than half of Hopper's shared memory: two that start early on the same
    multiprocessor, while the kernel before holds the others, would take twice as long.

    Args:
        num_rows: of `x`.
        num_outputs: rows of the weight.
        size: of a row of either.
        num_multiprocessors: of the GPU.
    """
    if num_rows > MAX_SPLIT_ROWS or num_outputs * size > MAX_SPLIT_WEIGHT:
        return None
    is_small = num_rows <= 2 * MIN_SPLIT_BLOCK
    block_rows = MIN_SPLIT_BLOCK if is_small else 2 * MIN_SPLIT_BLOCK
    block_size = 128 if is_small else 64
    num_blocks = ceil_div(num_rows, block_rows) * ceil_div(num_outputs, MIN_SPLIT_BLOCK)
    num_parts = 1
    while 2 * num_parts * num_blocks <= num_multiprocessors and 2 * num_parts * block_size <= size:
        num_parts *= 2
    if num_parts == 1:
        return None
    return SplitTiling(
        *(block_rows, MIN_SPLIT_BLOCK, block_size, num_parts),
        num_warps=4 if is_small else 8,
        num_stages=4 if is_small else 5,
    )
