"""How work is cut into programs: plain numbers, decided on the host before anything is launched.

A captured graph launches the same grid for ever. So nothing here may depend on what the host does
not know at capture: the lengths of the contexts are read on the device.

Knows no tensor and no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MIN_TOKENS_A_WORKER = 32  # less, and a program ends before its loads have got going
MAX_NEIGHBOURS = 4  # attention's programs a multiprocessor: more have no registers
MIN_BLOCK = 16  # rows, tokens or a head's numbers: the least that a tensor core multiplies
MAX_AHEAD = 4  # steps of a weight that the registers hold
SHORT_ROW = 2048  # of a weight: 16 of them fit in the registers of a program
SOME_SHARED_MEMORY = 96 * 1024  # a program's on an A10 is a little more; a T4 has 64 KiB
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
        num_empty_tiles: that the plan lays behind a sequence's, for the time it takes to turn to
            another one.
    """

    block_tokens: int
    num_warps: int
    num_stages: int
    num_neighbours: int
    num_empty_tiles: int


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """How a prefill's attention is cut.

    Attributes:
        block_rows: queries a program.
        block_tokens: keys a step of the program's loop.
        num_stages: steps that are loaded ahead of the arithmetic, and the one at work.
    """

    block_rows: int
    block_tokens: int
    num_stages: int


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
    num_programs: int,
    num_rows: int,
    head_bytes: int,
    num_multiprocessors: int,
    shared_memory_bytes: int,
) -> AttentionTiling:
    """Return the steps of a decode step's attention.

    Where several programs share a multiprocessor, small steps of many keep the memory busy. There
    must be just as many as fit: with fewer, one multiprocessor gets more of them than another, and
    the equal shares of its programs take longer. Where each is alone, it must ask for more at a
    time, if there is room for it. (Where only one fits, two of small steps take turns.) Heads that
    are so large that not even one program fits get smaller steps. (If they are of 256 and the rows
    more than 32, there is still no room on an A10 in float32, nor on a T4.)

    Args:
        num_programs: sequences times KV heads.
        num_rows: `num_query_rows` of a program.
        head_bytes: one token's key of one head.
        num_multiprocessors: of the GPU.
        shared_memory_bytes: that one program may take.
    """
    is_crowded = num_programs > num_multiprocessors or shared_memory_bytes < LARGE_SHARED_MEMORY
    if is_crowded:
        block_tokens, num_warps, num_stages = 32, 2, 7
    elif 2 * num_programs > num_multiprocessors:
        block_tokens, num_warps, num_stages = 128, 4, 5
    else:
        block_tokens, num_warps, num_stages = 64, 4, 9
    while attention_bytes(num_rows, block_tokens, num_stages, head_bytes) > shared_memory_bytes:
        if block_tokens > 32:  # noqa: PLR2004 -- tokens: fewer cost more than fewer steps ahead
            block_tokens //= 2
        elif num_stages > 3:  # noqa: PLR2004 -- one step ahead
            num_stages -= 2
        else:
            block_tokens = MIN_BLOCK
            break
    if not is_crowded:
        return AttentionTiling(block_tokens, num_warps, num_stages, 1, num_empty_tiles=0)
    num_bytes = attention_bytes(num_rows, block_tokens, num_stages, head_bytes)
    num_neighbours = max(min(shared_memory_bytes // num_bytes, MAX_NEIGHBOURS), 2)
    return AttentionTiling(block_tokens, num_warps, num_stages, num_neighbours, num_empty_tiles=2)


def num_query_rows(group: int) -> int:
    """Return the rows of a program of a decode's attention: the heads that share a KV head."""
    return max(next_power_of_two(group), MIN_BLOCK)


def attention_bytes(num_rows: int, block_tokens: int, num_stages: int, head_bytes: int) -> int:
    """Return the shared memory that a program of a decode's attention takes at most.

    That is keys and values of the `(num_stages - 1) // 2` steps ahead, the queries, and a row of
    scores for each of them. With more than 16 rows the compiler moves scores and keys to and fro:
    once more of both. (Measured: what the compiler says of 16 and 32 bit, 16 to 64 rows, heads of
    32 to 256, compute capabilities from 8.0 to 12.0. Pages that are no multiple of a tile take up
    to 1 KiB more, which changes no choice made here.)
    """
    num_moved = 0 if num_rows == MIN_BLOCK else 1
    num_keys = ((num_stages - 1) // 2 * 2 + num_moved) * block_tokens
    score_bytes = (1 + num_moved) * (block_tokens + 4) * 4
    return (num_keys + num_rows) * head_bytes + num_rows * score_bytes


def choose_prefill_tiling(head_bytes: int, shared_memory_bytes: int) -> PrefillTiling:
    """Return how a prefill's attention is cut: as large as fits, up to 64 rows and 64 keys.

    Args:
        head_bytes: one token's key of one head.
        shared_memory_bytes: that one program may take.
    """
    for cut in ((64, 64, 3), (64, 32, 3), (64, 16, 3), (32, 16, 3), (16, 16, 3)):
        tiling = PrefillTiling(*cut)
        if prefill_bytes(tiling, head_bytes) <= shared_memory_bytes:
            return tiling
    return PrefillTiling(block_rows=16, block_tokens=16, num_stages=2)


def prefill_bytes(tiling: PrefillTiling, head_bytes: int) -> int:
    """Return the shared memory that a program of a prefill's attention takes at most.

    (Measured as in `attention_bytes`. Heads of less than 256 bytes take a little more, and fit
    anywhere.)
    """
    num_keys_and_values = (tiling.num_stages - 1) * tiling.block_tokens * 2
    return (num_keys_and_values + 2 * tiling.block_rows) * head_bytes


def choose_row_tiling(size: int) -> Tiling:
    """Return the tiling of a product with one row, which is done in one step.

    Few rows of the weight a program: many small programs start one after another, and so the first
    ones of a kernel find room while the kernel before it still runs.
    """
    block_size = next_power_of_two(size)
    block_outputs = max(min(4, 16384 // block_size), 1)  # more would not fit in the registers
    return Tiling(block_outputs, block_size, num_warps=4)


def choose_skinny_tiling(
    size: int, num_weights: int, number_bytes: int, shared_memory_bytes: int
) -> Tiling:
    """Return the tiling of a product with 2 to 16 rows.

    Args:
        size: of a row of the weight.
        num_weights: 2 where gate and up are done at once, else 1.
        number_bytes: of a number of the weight.
        shared_memory_bytes: that one program may take.
    """
    has_room = shared_memory_bytes >= SOME_SHARED_MEMORY
    block_outputs = 16 if has_room and num_weights == 1 and size <= SHORT_ROW else 8
    tiling = Tiling(block_outputs, block_size=1024 if has_room else 512, num_warps=4)
    while skinny_bytes(tiling, size, num_weights, number_bytes) > shared_memory_bytes:
        if tiling.block_size == MIN_BLOCK * tiling.num_warps:
            break
        tiling = replace(tiling, block_size=tiling.block_size // 2)
    return tiling


def num_skinny_ahead(tiling: Tiling, size: int, num_weights: int) -> int:
    """Return how many steps of a weight are loaded before anything else, into registers."""
    return min(ceil_div(size, tiling.block_size), MAX_AHEAD // num_weights)


def skinny_bytes(tiling: Tiling, size: int, num_weights: int, number_bytes: int) -> int:
    """Return the shared memory that a program of `skinny_matmul` takes at most.

    That is a step of the rows, and the weights' of all steps that were loaded ahead, on their way
    to the tensor cores; of a very long row, two steps of both. (Measured as in `attention_bytes`.)
    """
    num_ahead = num_skinny_ahead(tiling, size, num_weights)
    a_step = tiling.block_outputs * num_weights
    num_lines = MIN_BLOCK + a_step * num_ahead
    if size > num_ahead * tiling.block_size:
        num_lines = max(num_lines, 2 * (MIN_BLOCK + a_step))
    return num_lines * tiling.block_size * number_bytes


def choose_split_tiling(
    num_rows: int,
    num_outputs: int,
    size: int,
    number_bytes: int,
    num_multiprocessors: int,
    shared_memory_bytes: int,
) -> SplitTiling | None:
    """Return how to split a product with some dozens of rows, None where cuBLAS is faster.

    Each program takes more than half of Hopper's shared memory: two that start early on the same
    multiprocessor, while the kernel before holds the others, would take twice as long.

    Args:
        num_rows: of `x`.
        num_outputs: rows of the weight.
        size: of a row of either.
        number_bytes: of a number of either.
        num_multiprocessors: of the GPU.
        shared_memory_bytes: that one program may take.
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
    bytes_of_a_stage = (block_rows + MIN_SPLIT_BLOCK) * block_size * number_bytes
    num_stages = min(4 if is_small else 5, shared_memory_bytes // bytes_of_a_stage)
    if num_parts == 1 or num_stages < 2:  # noqa: PLR2004 -- the one at work, and one ahead
        return None
    num_warps = 4 if is_small else 8
    return SplitTiling(block_rows, MIN_SPLIT_BLOCK, block_size, num_parts, num_warps, num_stages)
