"""The page pool against a naive one, told the same things in random order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.observer import SILENT
from nanovllm.sampling_params import SamplingParams
from support.naive_pool import NaivePool

if TYPE_CHECKING:
    from hypothesis.stateful import MultipleResults


class PoolMachine(RuleBasedStateMachine):
    """The real pool and the naive one, told the same."""

    sequences = Bundle("sequences")

    @initialize(
        num_blocks=st.integers(1, 12), block_size=st.integers(1, 5), is_caching=st.booleans()
    )
    def build(self, num_blocks: int, block_size: int, is_caching: bool) -> None:
        self.pool = BlockManager(num_blocks, block_size, SILENT, enable_prefix_caching=is_caching)
        self.naive = NaivePool(num_blocks, block_size, is_caching)
        self.alive: dict[int, Sequence] = {}
        self.num_seqs = 0

    @rule(target=sequences, prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def admit(self, prompt: list[int]) -> Sequence | MultipleResults[Sequence]:
        seq = Sequence(self.num_seqs, prompt, SamplingParams())
        prefix = self.pool.match_prefix(seq)
        assert prefix == self.naive.match(prompt)
        num_blocks = self.pool.num_blocks_to_take(seq, prefix)
        assert num_blocks == self.naive.num_to_take(prompt)
        if num_blocks > self.pool.num_free_blocks:
            return multiple()
        self.num_seqs += 1
        self.pool.allocate(seq, prefix)
        self.naive.admit(seq.seq_id, prompt)
        self.alive[seq.seq_id] = seq
        return seq

    @rule(seq=sequences, num_tokens=st.integers(1, 14))
    def compute(self, seq: Sequence, num_tokens: int) -> None:
        before = seq.num_computed_tokens
        seq.num_computed_tokens = min(before + num_tokens, seq.num_tokens)
        self.pool.hash_full_blocks(seq, before)
        self.naive.compute(seq.seq_id, seq.num_computed_tokens - before)

    @precondition(lambda self: self.pool.num_free_blocks)
    @rule(seq=sequences, token_id=st.integers(0, 1))
    def append(self, seq: Sequence, token_id: int) -> None:
        seq.token_ids.append(token_id)
        assert self.pool.can_append(seq)
        self.pool.may_append(seq)
        assert not self.pool.needs_block(seq)
        self.naive.append(seq.seq_id, token_id)

    @rule(seq=consumes(sequences))
    def release(self, seq: Sequence) -> None:
        assert self.pool.deallocate(seq) == self.naive.release(seq.seq_id)
        assert not seq.block_table
        assert seq.num_computed_tokens == seq.num_cached_tokens == 0
        del self.alive[seq.seq_id]

    @rule(target=sequences, seq=consumes(sequences))
    def preempt_and_readmit(self, seq: Sequence) -> Sequence | MultipleResults[Sequence]:
        self.release(seq)
        prefix = self.pool.match_prefix(seq)  # with the hashes that it remembers
        assert prefix == self.naive.match(seq.token_ids)
        if self.pool.num_blocks_to_take(seq, prefix) > self.pool.num_free_blocks:
            return multiple()
        self.pool.allocate(seq, prefix)
        self.naive.admit(seq.seq_id, seq.token_ids)
        self.alive[seq.seq_id] = seq
        return seq

    @invariant()
    def both_pools_are_the_same(self) -> None:
        self.pool.check(self.alive.values())
        assert list(self.pool.free_blocks) == self.naive.free
        assert self.pool.num_free_blocks == len(self.naive.free)
        assert self.pool.cached_blocks == self.naive.cached_blocks()
        assert {seq_id: seq.block_table for seq_id, seq in self.alive.items()} == {
            seq_id: seq.table for seq_id, seq in self.naive.sequences.items()
        }
        for seq_id, seq in self.alive.items():
            assert seq.num_computed_tokens == self.naive.sequences[seq_id].num_computed
            assert seq.num_cached_tokens % self.pool.block_size == 0


TestPoolAgainstNaivePool = PoolMachine.TestCase
