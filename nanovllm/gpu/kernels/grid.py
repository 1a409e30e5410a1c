"""How work is divided into programs: plain numbers, computed on the host before a launch.

A captured graph always launches the same grid. So nothing here may depend on values that the host
does not know at capture: the lengths of the contexts are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MIN_TOKENS_A_WORKER = 32  # with fewer, a program is too short for its loads
MAX_NEIGHBOURS = 4  # attention programs per multiprocessor: there are no registers for more
MIN_BLOCK = 16  # rows, tokens or numbers of a head: the smallest size for a tensor core
MAX_AHEAD = 4  # steps of a weight that the registers hold
SHORT_ROW = 2048  # of a weight: 16 such rows fit in the registers of a program
SOME_SHARED_MEMORY = 96 * 1024  # bytes per program: an A10 has a little more; a T4 has 64 KiB
LARGE_SHARED_MEMORY = 160 * 1024  # bytes per program: an A100 or newer has more
MIN_SPLIT_BLOCK = 64  # rows: the smallest size for Hopper's tensor cores
MAX_SPLIT_ROWS = 256
MAX_SPLIT_WEIGHT = 8 * 1024 * 1024  # numbers: with larger weights an early start matters less


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a matrix product is divided.

    Attributes:
        block_outputs: rows of the weight per program.
        block_size: columns of the weight per step of the program's loop.
        num_warps: of a program, 32 threads each.
    """

    block_outputs: int
    block_size: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class SplitTiling:
    """How a matrix product with 17 to 256 rows is divided.

    Attributes:
        block_rows: rows of `x` per program.
        block_outputs: rows of the weight per program.
        block_size: columns of both per step of the program's loop.
        num_parts: into which the columns are split, one program for each.
        num_warps: of a program, 32 threads each.
        num_stages: steps in shared memory: those that are prefetched, and the one in use.
    """

    block_rows: int
    block_outputs: int
    block_size: int
    num_parts: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """How the attention of a decode step is divided.

    Attributes:
        block_tokens: keys per step of the program's loop.
        num_warps: of a program, 32 threads each.
        num_stages: how many loads are prefetched: 3, 5, 7 mean 1, 2, 3 steps (each step has two
            loads, the block id and then the contents of the block).
        num_neighbours: programs per multiprocessor.
        num_empty_tiles: added after each sequence in the plan, for the time that beginning another
            sequence takes.
    """

    block_tokens: int
    num_warps: int
    num_stages: int
    num_neighbours: int
    num_empty_tiles: int


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """How the attention of a prefill is divided.

    Attributes:
        block_rows: queries per program.
        block_tokens: keys per step of the program's loop.
        num_stages: steps in shared memory: those that are prefetched, and the one in use.
    """

    block_rows: int
    block_tokens: int
    num_stages: int


def next_power_of_two(size: int) -> int:
    """Return the smallest power of two that is not below `size` (1 for 0)."""
    return 1 << max(size - 1, 0).bit_length()


def ceil_div(size: int, part: int) -> int:
    """Return `size / part`, rounded up."""
    return -(-size // part)


def choose_workers(
    num_seqs: int,
    num_kv_heads: int,
    max_context: int,
    tiling: AttentionTiling,
    num_multiprocessors: int,
) -> int:
    """Return the number of workers that share the contexts of a decode step.

    A worker is one program for each KV head. There are as many as the GPU can run at once, so all
    start together; their shares are equal, so all end together.

    Args:
        num_seqs: rows of the step, padding included.
        num_kv_heads: of this rank.
        max_context: the longest possible context, in tokens.
        tiling: of the programs.
        num_multiprocessors: of the GPU.

    Returns:
        At least 1, and no more than can have work.

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
    """Return how the attention of a decode step is divided.

    If several programs share a multiprocessor, small steps keep the memory busy. There must be
    exactly as many programs as fit: with fewer, one multiprocessor gets more programs than another,
    and these take longer. If a program has a multiprocessor alone, its steps must be larger, if the
    shared memory allows it. (If only one fits, two programs with small steps take turns.) With
    heads so large that not even one program fits, the steps are smaller. (Heads of 256 with more
    than 32 rows still do not fit on an A10 in float32, nor on a T4.)

    Args:
        num_programs: sequences times KV heads.
        num_rows: `num_query_rows` of a program.
        head_bytes: bytes of the key of one token and one head.
        num_multiprocessors: of the GPU.
        shared_memory_bytes: that one program may use.
    """
    is_crowded = num_programs > num_multiprocessors or shared_memory_bytes < LARGE_SHARED_MEMORY
    if is_crowded:
        block_tokens, num_warps, num_stages = 32, 2, 7
    elif 2 * num_programs > num_multiprocessors:
        block_tokens, num_warps, num_stages = 128, 4, 5
    else:
        block_tokens, num_warps, num_stages = 64, 4, 9
    while attention_bytes(num_rows, block_tokens, num_stages, head_bytes) > shared_memory_bytes:
        if block_tokens > 32:  # noqa: PLR2004 -- tokens: below that, fewer stages are better
            block_tokens //= 2
        elif num_stages > 3:  # noqa: PLR2004 -- one step is prefetched
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
    """Return the maximum shared memory of a program of a decode's attention, in bytes.

    It holds keys and values of the `(num_stages - 1) // 2` prefetched steps, the queries, and a row
    of scores for each of them. With more than 16 rows the compiler needs another copy of scores and
    keys. (Measured from the compiler's output, with 16 and 32 bit, 16 to 64 rows, heads of 32 to
    256, compute capabilities from 8.0 to 12.0. A block size that is not a multiple of a tile takes
    up to 1 KiB more, which changes no choice here.)
    """
    num_moved = 0 if num_rows == MIN_BLOCK else 1
    num_keys = ((num_stages - 1) // 2 * 2 + num_moved) * block_tokens
    score_bytes = (1 + num_moved) * (block_tokens + 4) * 4
    return (num_keys + num_rows) * head_bytes + num_rows * score_bytes


def choose_prefill_tiling(head_bytes: int, shared_memory_bytes: int) -> PrefillTiling:
    """Return how the attention of a prefill is divided: as large as fits, up to 64 rows and keys.

    Args:
        head_bytes: bytes of the key of one token and one head.
        shared_memory_bytes: that one program may use.
    """
    for cut in ((64, 64, 3), (64, 32, 3), (64, 16, 3), (32, 16, 3), (16, 16, 3)):
        tiling = PrefillTiling(*cut)
        if prefill_bytes(tiling, head_bytes) <= shared_memory_bytes:
            return tiling
    return PrefillTiling(block_rows=16, block_tokens=16, num_stages=2)


def prefill_bytes(tiling: PrefillTiling, head_bytes: int) -> int:
    """Return the maximum shared memory of a program of a prefill's attention, in bytes.

    (Measured as in `attention_bytes`. Heads of less than 256 bytes take a little more, but fit on
    every GPU.)
    """
    num_keys_and_values = (tiling.num_stages - 1) * tiling.block_tokens * 2
    return (num_keys_and_values + 2 * tiling.block_rows) * head_bytes


def choose_row_tiling(size: int) -> Tiling:
    """Return the tiling of a product with one row, which is computed in one step.

    Each program has few rows of the weight: the programs are small and many, so the first ones can
    start while the previous kernel still runs.
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
        num_weights: 2 if gate and up are computed together, else 1.
        number_bytes: bytes of a number of the weight.
        shared_memory_bytes: that one program may use.
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
    """Return how many steps of a weight are first loaded into registers."""
    return min(ceil_div(size, tiling.block_size), MAX_AHEAD // num_weights)


def skinny_bytes(tiling: Tiling, size: int, num_weights: int, number_bytes: int) -> int:
    """Return the maximum shared memory of a program of `skinny_matmul`, in bytes.

    It holds one step of the rows and the prefetched steps of the weight; for a very long row, two
    steps of both. (Measured as in `attention_bytes`.)
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
    """Return how to split a product with 17 to 256 rows; None if cuBLAS is faster.

    Each program uses more than half of Hopper's shared memory, so that no two of them start on the
    same multiprocessor while the previous kernel still uses the others: they would take twice as
    long.

    Args:
        num_rows: of `x`.
        num_outputs: rows of the weight.
        size: of a row of either.
        number_bytes: bytes of a number of either.
        num_multiprocessors: of the GPU.
        shared_memory_bytes: that one program may use.
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
    if num_parts == 1 or num_stages < 2:  # noqa: PLR2004 -- one in use, and one prefetched
        return None
    num_warps = 4 if is_small else 8
    return SplitTiling(block_rows, MIN_SPLIT_BLOCK, block_size, num_parts, num_warps, num_stages)
