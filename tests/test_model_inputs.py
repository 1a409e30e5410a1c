"""How a batch is laid out: the article's numbers, and what holds for any batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nanovllm.engine.batch import Batch
from nanovllm.engine.model_inputs import prepare_decode, prepare_prefill
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def sequence(seq_id: int, num_tokens: int, block_table: list[int], num_computed: int) -> Sequence:
    """A sequence of recognizable tokens: 1000 * its number + the position."""
    tokens = [1000 * (seq_id + 1) + position for position in range(num_tokens)]
    seq = Sequence(seq_id, tokens, SamplingParams())
    seq.block_table = block_table
    seq.num_computed_tokens = num_computed
    return seq


def put(batch: Batch, seq: Sequence, num_tokens: int) -> None:
    batch.token_budget = num_tokens
    batch.add(seq)


def batch_of(*pieces: tuple[Sequence, int]) -> Batch:
    batch = Batch(0)
    for seq, num_tokens in pieces:
        put(batch, seq, num_tokens)
    return batch


# -- the article's run: prompts of 11 and 17 tokens, pages of 256 ----------------------------------


def test_the_articles_prefill_is_laid_out_as_the_article_shows() -> None:
    first, second = sequence(0, 11, [0], 0), sequence(1, 17, [1], 0)
    inputs = prepare_prefill(batch_of((first, 11), (second, 17)), block_size=256)
    assert inputs.input_ids == first.token_ids + second.token_ids
    assert len(inputs.input_ids) == 28
    assert inputs.positions == [*range(11), *range(17)]
    assert inputs.cu_seqlens_q == inputs.cu_seqlens_k == [0, 11, 28]
    assert inputs.max_seqlen_q == inputs.max_seqlen_k == 17
    assert inputs.slot_mapping == [*range(11), *range(256, 273)]
    assert inputs.slot_ranges == [(0, 10), (256, 272)]
    assert inputs.position_ranges == [(0, 10), (0, 16)]
    assert inputs.block_tables is None
    assert inputs.logits_indices == [10, 27]


def test_the_articles_first_decode_is_laid_out_as_the_article_shows() -> None:
    first, second = sequence(0, 12, [0], 11), sequence(1, 18, [1], 17)
    inputs = prepare_decode(batch_of((first, 1), (second, 1)), block_size=256)
    assert inputs.input_ids == [1011, 2017]
    assert inputs.positions == [11, 17]
    assert inputs.context_lens == [12, 18]
    assert inputs.slot_mapping == [11, 273]
    assert inputs.block_tables == [[0], [1]]


# -- by example ------------------------------------------------------------------------------------


def test_a_prompt_that_spans_blocks_has_one_run_of_slots_for_each() -> None:
    seq = sequence(0, 10, [5, 0, 2], 0)
    inputs = prepare_prefill(batch_of((seq, 10)), block_size=4)
    assert inputs.slot_ranges == [(20, 23), (0, 3), (8, 9)]
    assert inputs.slot_mapping == [20, 21, 22, 23, 0, 1, 2, 3, 8, 9]


def test_a_cached_prefix_lengthens_the_keys_and_not_the_queries() -> None:
    hit, fresh = sequence(0, 7, [3, 1], 4), sequence(1, 2, [0], 0)
    inputs = prepare_prefill(batch_of((hit, 3), (fresh, 2)), block_size=4)
    assert inputs.input_ids == [1004, 1005, 1006, 2000, 2001]
    assert inputs.positions == [4, 5, 6, 0, 1]
    assert (inputs.cu_seqlens_q, inputs.max_seqlen_q) == ([0, 3, 5], 3)
    assert (inputs.cu_seqlens_k, inputs.max_seqlen_k) == ([0, 7, 9], 7)
    assert inputs.block_tables == [[3, 1], [0, 0]]  # padded to the longest
    assert inputs.slot_mapping == [4, 5, 6, 0, 1]


def test_an_unfinished_chunk_has_no_logits() -> None:
    seq = sequence(0, 10, [0, 1, 2], 4)
    batch = batch_of((seq, 3))
    assert batch.sampled_seqs == []
    assert prepare_prefill(batch, block_size=4).logits_indices == []
    whole = batch_of((seq, 6))
    assert whole.sampled_seqs == [seq]
    assert prepare_prefill(whole, block_size=4).logits_indices == [5]


def test_an_empty_batch_is_false() -> None:
    assert not Batch(1)
    assert batch_of((sequence(0, 1, [0], 0), 1))


# -- for any batch ---------------------------------------------------------------------------------


@st.composite
def prefills(draw: st.DrawFn) -> tuple[Batch, int]:
    """A prefill of sequences in any state, with tables drawn from one pool of pages."""
    block_size = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    pages = draw(st.permutations(range(sum(-(-length // block_size) for length in lengths))))
    batch = Batch(0)
    for seq_id, length in enumerate(lengths):
        num_pages = -(-length // block_size)
        table, pages = pages[:num_pages], pages[num_pages:]
        num_computed = draw(st.integers(0, length - 1))
        seq = sequence(seq_id, length, list(table), num_computed)
        put(batch, seq, draw(st.integers(1, length - num_computed)))
    return batch, block_size


@given(prefills())
def test_every_token_of_a_prefill_is_where_its_sequence_says(prefill: tuple[Batch, int]) -> None:
    batch, block_size = prefill
    inputs = prepare_prefill(batch, block_size)
    row = 0
    for index, (seq, num_tokens) in enumerate(
        zip(batch.seqs, batch.num_scheduled_tokens, strict=True)
    ):
        assert inputs.cu_seqlens_q[index] == row
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
            page, offset = divmod(position, block_size)
            assert inputs.input_ids[row] == seq.token_ids[position]
            assert inputs.positions[row] == position
            assert inputs.slot_mapping[row] == seq.block_table[page] * block_size + offset
            row += 1
        context_len = inputs.cu_seqlens_k[index + 1] - inputs.cu_seqlens_k[index]
        assert context_len == seq.num_computed_tokens + num_tokens
        is_sampled = context_len == seq.num_tokens
        assert (row - 1 in inputs.logits_indices) == is_sampled == (seq in batch.sampled_seqs)
    assert row == len(inputs.input_ids) == len(inputs.positions) == inputs.cu_seqlens_q[-1]
    assert len(inputs.logits_indices) == len(batch.sampled_seqs)
    assert inputs.logits_indices == sorted(inputs.logits_indices)


@given(prefills())
def test_ranges_and_lengths_of_a_prefill_say_the_same_as_its_rows(
    prefill: tuple[Batch, int],
) -> None:
    batch, block_size = prefill
    inputs = prepare_prefill(batch, block_size)
    slots = [slot for first, last in inputs.slot_ranges for slot in range(first, last + 1)]
    assert slots == inputs.slot_mapping
    assert len(set(slots)) == len(slots), "two tokens share a slot"
    for first, last in inputs.slot_ranges:
        assert first <= last
        assert first // block_size == last // block_size, "a run crosses a page boundary"
    positions = [p for first, last in inputs.position_ranges for p in range(first, last + 1)]
    assert positions == inputs.positions
    assert inputs.max_seqlen_q == max(batch.num_scheduled_tokens)
    assert inputs.max_seqlen_k == max(last + 1 for _, last in inputs.position_ranges)
    has_context = any(seq.num_computed_tokens for seq in batch.seqs)
    assert (inputs.block_tables is not None) == has_context


@given(prefills())
def test_tables_are_padded_to_one_width_and_leave_the_sequences_alone(
    prefill: tuple[Batch, int],
) -> None:
    batch, block_size = prefill
    tables = [list(seq.block_table) for seq in batch.seqs]
    for seq in batch.seqs:
        seq.num_computed_tokens = seq.num_tokens - 1
    decode = batch_of(*((seq, 1) for seq in batch.seqs))
    inputs = prepare_decode(decode, block_size)
    assert len({len(row) for row in inputs.block_tables}) == 1
    for row, table in zip(inputs.block_tables, tables, strict=True):
        assert row == table + [0] * (len(row) - len(table))
    inputs.block_tables[0].append(99)
    assert [seq.block_table for seq in batch.seqs] == tables


@given(prefills())
def test_every_token_of_a_decode_is_the_last_of_its_sequence(prefill: tuple[Batch, int]) -> None:
    batch, block_size = prefill
    for seq in batch.seqs:
        seq.num_computed_tokens = seq.num_tokens - 1
    decode = batch_of(*((seq, 1) for seq in batch.seqs))
    inputs = prepare_decode(decode, block_size)
    assert inputs.input_ids == [seq.token_ids[-1] for seq in batch.seqs]
    assert inputs.context_lens == [seq.num_tokens for seq in batch.seqs]
    assert inputs.positions == [seq.num_tokens - 1 for seq in batch.seqs]
    for seq, slot in zip(batch.seqs, inputs.slot_mapping, strict=True):
        assert slot // block_size == seq.block_table[-1]
        assert slot % block_size == (seq.num_tokens - 1) % block_size
    assert len(set(inputs.slot_mapping)) == len(batch.seqs)
