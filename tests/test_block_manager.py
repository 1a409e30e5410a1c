"""The page pool, rule by rule."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from nanovllm.engine.block_manager import BlockManager, hash_block
from nanovllm.engine.sequence import Sequence
from nanovllm.observer import SILENT, Observer
from nanovllm.sampling_params import SamplingParams


class Pool:
    """A pool with shorthands for the life of a sequence."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        observer: Observer = SILENT,
        *,
        is_caching: bool = True,
    ) -> None:
        self.manager = BlockManager(
            num_blocks, block_size, observer, enable_prefix_caching=is_caching
        )
        self.num_seqs = 0

    def admit(self, tokens: list[int]) -> Sequence:
        seq = Sequence(self.num_seqs, tokens, SamplingParams())
        self.num_seqs += 1
        self.manager.allocate(seq, self.manager.match_prefix(seq))
        return seq

    def compute(self, seq: Sequence) -> Sequence:
        before, seq.num_computed_tokens = seq.num_computed_tokens, seq.num_tokens
        self.manager.hash_full_blocks(seq, before)
        return seq

    def free(self) -> list[int]:
        return list(self.manager.free_blocks)


class Ear(Observer):
    """Hears the page operations that the examples ask about, as (word, seq_id, pages)."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int | None, list[int]]] = []

    def blocks_share(self, seq: Sequence, block_id: int) -> None:
        self.heard.append(("share", seq.seq_id, [block_id]))

    def blocks_revive(self, seq: Sequence, block_id: int) -> None:
        self.heard.append(("revive", seq.seq_id, [block_id]))

    def blocks_allocate(self, seq: Sequence, block_ids: list[int]) -> None:
        self.heard.append(("allocate", seq.seq_id, list(block_ids)))

    def blocks_evict(self, block_ids: list[int], hashes: list[bytes], reason: str) -> None:
        assert reason == "page_needed"
        assert len(hashes) == len(block_ids)
        self.heard.append(("evict", None, list(block_ids)))

    def blocks_release(self, seq: Sequence, block_ids: list[int], freed: list[int]) -> None:
        self.heard.append(("release", seq.seq_id, list(block_ids)))
        self.heard.append(("free", seq.seq_id, list(freed)))


# -- the order in which pages are taken ------------------------------------------------------------


def test_pages_without_contents_are_taken_before_hashed_ones() -> None:
    pool = Pool(num_blocks=4, block_size=2)
    hashed = pool.compute(pool.admit([1, 2, 3]))  # pages 0 (hashed) and 1 (half full)
    pool.manager.deallocate(hashed)
    assert pool.free() == [1, 2, 3, 0]


def test_hashed_pages_are_evicted_least_recently_used_first() -> None:
    pool = Pool(num_blocks=3, block_size=1)
    first, second, third = (pool.compute(pool.admit([token])) for token in (1, 2, 3))
    for seq in (second, first, third):
        pool.manager.deallocate(seq)
    assert pool.free() == [1, 0, 2]
    pool.manager.deallocate(pool.admit([2, 9]))  # revives page 1, and evicts page 0 for the 9
    assert pool.free() == [0, 2, 1]


def test_of_one_sequence_the_deepest_page_is_evicted_first() -> None:
    pool = Pool(num_blocks=3, block_size=2)
    pool.manager.deallocate(pool.compute(pool.admit([1, 2, 3, 4, 5, 6])))
    assert pool.free() == [2, 1, 0]
    other = pool.admit([9])  # takes page 2
    assert other.block_table == [2]
    assert pool.manager.match_prefix(Sequence(9, [1, 2, 3, 4, 5], SamplingParams())) == [0, 1]


def test_unhashed_pages_of_one_sequence_are_taken_again_in_its_own_order() -> None:
    pool = Pool(num_blocks=5, block_size=2, is_caching=False)
    pool.manager.deallocate(pool.compute(pool.admit([1, 2, 3, 4, 5, 6])))
    assert pool.free() == [0, 1, 2, 3, 4]


def test_any_page_of_a_large_pool_is_revived_without_a_search() -> None:
    pool = Pool(num_blocks=10**6, block_size=1)
    free = pool.manager.free_blocks
    assert isinstance(free, OrderedDict)  # first, last and any: each in constant time
    middle = range(5 * 10**5, 5 * 10**5 + 10**4)
    for block_id in middle:  # as if hashed long ago
        chain_hash = hash_block(b"", [block_id])
        pool.manager.cached_blocks[chain_hash] = block_id
        pool.manager.block_hashes[block_id] = chain_hash
    for block_id in middle:  # a search through the list would take 5 * 10**9 comparisons
        assert pool.admit([block_id, 0]).block_table[0] == block_id
    assert len(free) == 10**6 - 2 * 10**4


# -- sharing and reviving --------------------------------------------------------------------------


def test_a_hashed_page_in_use_is_shared_and_a_free_one_revived() -> None:
    ear = Ear()
    pool = Pool(num_blocks=8, block_size=2, observer=ear)
    first = pool.compute(pool.admit([1, 2, 3]))
    ear.heard.clear()
    second = pool.admit([1, 2, 4])
    assert ear.heard == [("share", second.seq_id, [0]), ("allocate", second.seq_id, [2])]
    assert pool.manager.ref_counts[0] == 2
    ear.heard.clear()
    assert pool.manager.deallocate(first) == [1]
    assert ear.heard == [("release", first.seq_id, [1, 0]), ("free", first.seq_id, [1])]
    assert pool.manager.deallocate(second) == [2, 0]
    ear.heard.clear()
    third = pool.admit([1, 2, 5])
    assert ear.heard == [("revive", third.seq_id, [0]), ("allocate", third.seq_id, [2])]


def test_reviving_takes_free_pages_and_sharing_takes_none() -> None:
    pool = Pool(num_blocks=3, block_size=2)
    first = pool.compute(pool.admit([1, 2, 3, 4]))
    probe = Sequence(9, [1, 2, 3, 4, 5], SamplingParams())
    assert pool.manager.num_blocks_to_take(probe, pool.manager.match_prefix(probe)) == 1
    pool.manager.deallocate(first)
    assert pool.manager.num_blocks_to_take(probe, pool.manager.match_prefix(probe)) == 3


def test_a_matched_page_is_never_taken_as_a_new_one_in_the_same_admission() -> None:
    pool = Pool(num_blocks=2, block_size=2)
    pool.manager.deallocate(pool.compute(pool.admit([1, 2])))
    pool.manager.free_blocks.move_to_end(0, last=False)  # page 0, hashed, is next in line
    assert pool.admit([1, 2, 3]).block_table == [0, 1]


def test_taking_a_hashed_page_evicts_it_and_says_so() -> None:
    ear = Ear()
    pool = Pool(num_blocks=2, block_size=2, observer=ear)
    pool.manager.deallocate(pool.compute(pool.admit([1, 2, 3, 4])))
    ear.heard.clear()
    other = pool.admit([7, 8])
    assert ear.heard == [("evict", None, [1]), ("allocate", other.seq_id, [1])]
    assert list(pool.manager.cached_blocks.values()) == [0]
    assert pool.manager.block_hashes[1] is None


def test_a_page_is_hashed_once_it_is_full_and_computed_and_not_before() -> None:
    pool = Pool(num_blocks=4, block_size=2)
    seq = pool.admit([1, 2, 3, 4])
    assert not pool.manager.cached_blocks  # full, but not computed
    for num_computed, hashed in ((1, []), (3, [0]), (4, [0, 1])):
        before, seq.num_computed_tokens = seq.num_computed_tokens, num_computed
        pool.manager.hash_full_blocks(seq, before)
        assert list(pool.manager.cached_blocks.values()) == hashed


def test_without_prefix_caching_nothing_is_hashed_or_matched() -> None:
    pool = Pool(num_blocks=8, block_size=2, is_caching=False)
    first, second = (pool.compute(pool.admit([1, 2, 3, 4])) for _ in range(2))
    assert not set(first.block_table) & set(second.block_table)
    assert not pool.manager.cached_blocks


def test_a_page_hash_depends_on_everything_before_it() -> None:
    assert hash_block(b"", [1, 2]) != hash_block(hash_block(b"", [0, 0]), [1, 2])
    assert hash_block(b"", [1, 2]) != hash_block(b"", [2, 1])
    assert hash_block(b"", [2**32 - 1]) != hash_block(b"", [2**31])


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_needed_are_rounded_up(num_tokens: int, num_blocks: int) -> None:
    assert Pool(9, block_size=4).manager.blocks_for(num_tokens) == num_blocks


def test_a_new_page_is_due_one_token_after_the_last_is_full() -> None:
    pool = Pool(num_blocks=2, block_size=4)
    seq = pool.compute(pool.admit([1, 2, 3]))
    seq.token_ids.append(4)
    assert not pool.manager.needs_block(seq)  # the page's last place
    seq.token_ids.append(5)
    assert seq.num_tokens % 4 == 1
    assert pool.manager.needs_block(seq)
    pool.manager.may_append(seq)
    pool.manager.may_append(seq)  # said twice, taken once
    assert seq.block_table == [0, 1]


# -- kinds 5, 7 and 8 of the faults that engines like this one had ---------------------------------


def test_a_fully_cached_prompt_still_computes_at_least_one_token() -> None:
    pool = Pool(num_blocks=16, block_size=4)
    prompt = list(range(8))
    cached = []
    for tokens in (prompt, prompt, [*prompt, 8, 9, 10, 11]):
        seq = pool.admit(tokens)
        cached.append(seq.num_cached_tokens)
        assert seq.num_uncomputed_tokens >= 1
        pool.manager.deallocate(pool.compute(seq))
    assert cached == [0, 4, 8]


def test_a_revived_page_must_match_in_all_tokens_before_it() -> None:
    pool = Pool(num_blocks=16, block_size=2)
    cached = []
    for tokens in ([1, 2, 3, 4], [1, 2, 5, 6, 7], [5, 6, 8]):
        seq = pool.admit(tokens)
        cached.append(seq.num_cached_tokens)
        pool.manager.deallocate(pool.compute(seq))
    assert cached == [0, 2, 0]


def test_two_equal_prompts_of_one_step_share_nothing_and_the_first_one_is_hashed() -> None:
    pool = Pool(num_blocks=16, block_size=4)
    first, second = pool.admit(list(range(8))), pool.admit(list(range(8)))
    assert second.num_cached_tokens == 0  # the first one's pages are not computed yet
    assert not set(first.block_table) & set(second.block_table)
    pool.compute(first)
    pool.compute(second)
    hashed = dict(pool.manager.cached_blocks)
    assert list(hashed.values()) == first.block_table

    pool.manager.deallocate(second)
    assert pool.manager.cached_blocks == hashed
    pool.manager.deallocate(first)
    assert pool.manager.cached_blocks == hashed
    third = pool.admit(list(range(9)))
    assert third.block_table[:2] == list(hashed.values())


# -- check() ---------------------------------------------------------------------------------------


def test_check_finds_a_page_held_twice_by_one_table() -> None:
    pool = Pool(4, block_size=2)
    seq = pool.admit([1])
    seq.block_table.append(seq.block_table[0])
    with pytest.raises(AssertionError, match="holds a block twice"):
        pool.manager.check([seq])


def test_check_finds_a_wrong_reference_count() -> None:
    pool = Pool(4, block_size=2)
    seq = pool.admit([1])
    pool.manager.ref_counts[seq.block_table[0]] = 2
    with pytest.raises(AssertionError, match="ref_counts say"):
        pool.manager.check([seq])


def test_check_finds_a_page_that_is_neither_held_nor_free() -> None:
    pool = Pool(4, block_size=2)
    del pool.manager.free_blocks[3]
    with pytest.raises(AssertionError, match="free"):
        pool.manager.check([])


def test_check_finds_a_hash_without_its_page() -> None:
    pool = Pool(4, block_size=2)
    seq = pool.compute(pool.admit([1, 2]))
    pool.manager.block_hashes[seq.block_table[0]] = None
    with pytest.raises(AssertionError, match="cached_blocks differ"):
        pool.manager.check([seq])


def test_reset_makes_every_page_free_and_empty_and_in_order() -> None:
    pool = Pool(4, block_size=2)
    pool.compute(pool.admit([1, 2, 3, 4]))
    pool.manager.reset()
    pool.manager.check([])
    assert pool.free() == [0, 1, 2, 3]
    assert not pool.manager.cached_blocks
