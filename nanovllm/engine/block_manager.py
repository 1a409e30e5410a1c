"""BlockManager: which blocks of the KV cache belong to which sequence.

It handles block ids, reference counts and the hashes of full blocks; the tensors are in
`kv_cache.py`. vLLM's counterparts are `vllm/v1/core/block_pool.py` and `kv_cache_manager.py`. (The
paper on PagedAttention calls a block a page.)

    pool    block  0    1    2    3    4    5        block_size tokens of K and V each
            refs   2    1    0    0    1    1
            hash   a    b    c    -    -    -        of blocks that are full and computed
    tables  seq 7: [0, 1, 4]     seq 9: [0, 5]       block 0 is shared
    free    3 -> 2                                   next taken ... last taken

Every block is either referenced by a table or in the free list. A free block that still has a hash
keeps its contents and can be *revived*. The free list is therefore also the eviction order: blocks
without a hash are put at its head, hashed ones at its tail (least recently used first; within one
sequence the last block of its table first, since a prefix can be shared more often than what
follows it: docs/decisions/0003).

A block's hash covers all tokens before it as well: hash(i) = H(hash(i-1), tokens of block i). A
block is hashed after its last token was computed, never before, so that no sequence reads an empty
block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

from nanovllm.engine.prefix_cache_stats import PrefixCacheStats

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nanovllm.engine.sequence import Sequence
    from nanovllm.observer import Observer


class BlockManager:
    """The pool of KV blocks.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens a block holds, at least 1.
        observer: called after every change.
        enable_prefix_caching: hash and share full blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        observer: Observer,
        *,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.observer = observer
        self.enable_prefix_caching = enable_prefix_caching
        self.stats = PrefixCacheStats()
        self.reset()

    def reset(self) -> None:
        """Make every block free and empty."""
        self.ref_counts = [0] * self.num_blocks
        self.block_hashes: list[bytes | None] = [None] * self.num_blocks
        self.cached_blocks: dict[bytes, int] = {}  # hash -> block
        # An ordered dict is a linked list with an index: first, last and any block in O(1).
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))

    def reset_prefix_cache(self) -> None:
        """Remove all hashes. Every block must be free; the free list does not change."""
        self.stats = PrefixCacheStats()
        hashes, block_ids = list(self.cached_blocks), list(self.cached_blocks.values())
        self.cached_blocks = {}
        self.block_hashes = [None] * self.num_blocks
        if block_ids:
            self.observer.blocks_evict(block_ids, hashes, "cache_reset")

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken now, hashed ones included."""
        return len(self.free_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps partly."""
        return -(-num_tokens // self.block_size)

    # -- admission -------------------------------------------------------------------------------

    def match_prefix(self, seq: Sequence) -> list[int]:
        """The hashed blocks that hold a prefix of `seq`, in its order. Takes none of them.

        They never hold the last token: at least one token must be computed, or there would be no
        logits to sample from. If every block is cached, the last one is computed again.
        """
        if not self.enable_prefix_caching:
            return []
        block_ids: list[int] = []
        for index in range((seq.num_tokens - 1) // self.block_size):
            block_id = self.cached_blocks.get(self._chain_hash(seq, index))
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_blocks_to_take(self, seq: Sequence, prefix: list[int]) -> int:
        """How many free blocks `allocate` would take: new ones, and those it would revive."""
        num_shared = sum(self.ref_counts[block_id] > 0 for block_id in prefix)
        return self.blocks_for(seq.num_tokens) - num_shared

    def allocate(self, seq: Sequence, prefix: list[int]) -> None:
        """Give `seq` blocks for all its tokens: `prefix` (from `match_prefix`) and new ones."""
        for block_id in prefix:  # first, so that none of them is taken as a new block below
            self.ref_counts[block_id] += 1
            seq.block_table.append(block_id)
            if self.ref_counts[block_id] > 1:
                self.observer.blocks_share(seq, block_id)
            else:
                del self.free_blocks[block_id]
                self.observer.blocks_revive(seq, block_id)
        block_ids = self._take_blocks(self.blocks_for(seq.num_tokens) - len(prefix))
        seq.block_table.extend(block_ids)
        seq.num_cached_tokens = seq.num_computed_tokens = len(prefix) * self.block_size
        if self.enable_prefix_caching:
            was_admitted_before = seq.num_prefill_tokens > 0
            self.stats.count(seq.num_tokens, seq.num_cached_tokens, is_resumed=was_admitted_before)
        self.observer.blocks_allocate(seq, block_ids)

    # -- decode ----------------------------------------------------------------------------------

    def needs_block(self, seq: Sequence) -> bool:
        """Does the last token of `seq` need a new block?

        That token was sampled by the step before and appended in `postprocess`; so with blocks of
        256 a new block is needed when num_tokens is 257, not 256.
        """
        return seq.num_tokens > len(seq.block_table) * self.block_size

    def can_append(self, seq: Sequence) -> bool:
        """Is there a block for the last token of `seq`, its own or a free one?"""
        return bool(self.free_blocks) or not self.needs_block(seq)

    def may_append(self, seq: Sequence) -> None:
        """Take one more block for `seq`, if its last token needs it. The name is nano-vllm's."""
        if self.needs_block(seq):
            block_ids = self._take_blocks(1)
            seq.block_table.extend(block_ids)
            self.observer.blocks_append(seq, block_ids)

    # -- after the computation -------------------------------------------------------------------

    def hash_full_blocks(self, seq: Sequence, num_computed_before: int) -> None:
        """Hash the blocks of `seq` that became full and computed since `num_computed_before`."""
        first = num_computed_before // self.block_size
        stop = seq.num_computed_tokens // self.block_size
        if first == stop or not self.enable_prefix_caching:
            return
        block_ids: list[int] = []
        hashes: list[bytes] = []
        for index in range(first, stop):
            block_id, chain_hash = seq.block_table[index], self._chain_hash(seq, index)
            if chain_hash in self.cached_blocks:
                continue  # computed twice (equal requests, a cached last block): keep the first
            self.cached_blocks[chain_hash] = block_id
            self.block_hashes[block_id] = chain_hash
            block_ids.append(block_id)
            hashes.append(chain_hash)
        if block_ids:
            self.observer.blocks_hash(seq, block_ids, hashes)

    def deallocate(self, seq: Sequence) -> list[int]:
        """Take all blocks from `seq`: nothing of it counts as computed. Returns those now free."""
        released = seq.block_table[::-1]  # the last one first
        freed = []
        for block_id in released:
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self.free_blocks[block_id] = None
                if self.block_hashes[block_id] is None:
                    self.free_blocks.move_to_end(block_id, last=False)
                freed.append(block_id)
        seq.block_table = []
        seq.num_computed_tokens = seq.num_cached_tokens = 0
        self.observer.blocks_release(seq, released, freed)
        return freed

    # -- inside ----------------------------------------------------------------------------------

    def _take_blocks(self, num_blocks: int) -> list[int]:
        """Take blocks from the free list's head. Hashed ones among them are evicted."""
        block_ids = [self.free_blocks.popitem(last=False)[0] for _ in range(num_blocks)]
        evicted: list[int] = []
        hashes: list[bytes] = []
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
            chain_hash = self.block_hashes[block_id]
            if chain_hash is not None:
                del self.cached_blocks[chain_hash]
                self.block_hashes[block_id] = None
                evicted.append(block_id)
                hashes.append(chain_hash)
        if evicted:
            self.observer.blocks_evict(evicted, hashes, "page_needed")  # a page is a block
        return block_ids

    def _chain_hash(self, seq: Sequence, index: int) -> bytes:
        """The hash of block `index` of `seq` and of all before it: 128 bits, cached on `seq`."""
        hashes = seq.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            parent = hashes[-1] if hashes else b""
            hashes.append(hash_block(parent, seq.token_ids[start : start + self.block_size]))
        return hashes[index]

    def check(self, seqs: Iterable[Sequence]) -> None:
        """Assert the invariants, given all sequences that may hold blocks. For tests and debugging.

        Raises:
            AssertionError: tables, ref counts, free list and hashes do not agree.
        """
        held = [0] * self.num_blocks
        for seq in seqs:
            table = seq.block_table
            assert len(set(table)) == len(table), f"{seq} holds a block twice: {table}"
            for block_id in table:
                held[block_id] += 1
        assert held == self.ref_counts, f"tables hold {held}, ref_counts say {self.ref_counts}"
        free = {block_id for block_id, count in enumerate(held) if count == 0}
        assert free == set(self.free_blocks), f"free: {free} by tables, {self.free_blocks} by list"
        hashed = {h: b for b, h in enumerate(self.block_hashes) if h is not None}
        assert hashed == self.cached_blocks, "block_hashes and cached_blocks differ"


def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    """H(parent, tokens): identifies a full block and all tokens before it.

    Args:
        parent: the hash of the block before, b"" for the first.
        token_ids: the block's tokens, each below 2**32.
    """
    return hashlib.blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()
