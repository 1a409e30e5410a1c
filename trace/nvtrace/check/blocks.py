"""Rules for blocks: the free list, block tables, reference counts and hashes.

No block is lost or allocated twice, and a hashed block holds the tokens of its hash.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from nvtrace import events as ev
from nvtrace.check.finding import Conflict, Fact, Rule, differ

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvtrace.check.ledger import Ledger
    from nvtrace.replay import State

    Reuse = ev.BlocksShare | ev.BlocksRevive
    Take = ev.BlocksAllocate | ev.BlocksAppend


def _from_head(ledger: Ledger, event: Take) -> Iterator[Conflict]:
    """Blocks are taken from the free list's head, in order."""
    taken = [block for blocks in event.block_ids for block in blocks]
    head = [block for block, _ in zip(ledger.state.free_blocks, taken, strict=False)]
    yield from differ("block_ids", taken, "free_list_head", head)


def _emptied(ledger: Ledger, event: Take) -> Iterator[Conflict]:
    """An allocated block is not hashed; the blocks just evicted are the ones allocated."""
    taken = [block for blocks in event.block_ids for block in blocks]
    hashed = [block for block in taken if block in ledger.state.block_hashes]
    if hashed:
        yield Conflict(Fact("block_ids", hashed), Fact("still_published", hashed))
    unused = [block for block in ledger.evicted if block not in taken]
    if unused:
        yield Conflict(Fact("block_ids", taken), Fact("evicted_pages", unused))


def _evict(ledger: Ledger, event: ev.BlocksEvict) -> Iterator[Conflict]:
    expected = [ledger.state.block_hashes.get(block) for block in event.block_ids]
    yield from differ("hashes", event.hashes, "published_hashes", expected)
    if event.reason == "cache_reset":
        yield from differ(
            "block_ids", event.block_ids, "published_pages", [*ledger.state.block_hashes]
        )
        unfinished = [*ledger.state.waiting, *ledger.state.running]
        if unfinished:
            yield Conflict(Fact("reason", event.reason), Fact("unfinished", unfinished))
    elif event.step is None:
        yield Conflict(Fact("reason", event.reason), Fact("step_under_way", None))
    held = [block for block in event.block_ids if ledger.state.ref_counts[block]]
    if held:
        yield Conflict(Fact("block_ids", held), Fact("held_pages", held))


def _ref_count_of_reused(ledger: Ledger, event: Reuse) -> Iterator[Conflict]:
    """Shared blocks are in a block table, revived ones in none."""
    is_revived = isinstance(event, ev.BlocksRevive)
    for block in event.block_ids[-1]:
        count = ledger.state.ref_counts[block]
        if (count == 0) != is_revived:
            yield Conflict(Fact("block_ids", block), Fact("ref_count", count))
            return


def _hash_of_reused(ledger: Ledger, event: Reuse) -> Iterator[Conflict]:
    """A block found in the cache holds the tokens of its place in the new table."""
    yield from _caching(ledger, event)
    for seq_id, blocks in zip(event.seq_ids, event.block_ids, strict=True):
        seq = ledger.seq(seq_id)
        for index, block in enumerate(blocks, start=len(seq.block_table)):
            expected = ledger.chain_hash(seq_id, index)
            held = ledger.state.block_hashes.get(block)
            if held != expected or (index + 1) * ledger.state.block_size >= len(seq.token_ids):
                yield Conflict(Fact("block_ids", [block, held]), Fact("hash_of_tokens", expected))
                return


def _caching(ledger: Ledger, event: ev.Event) -> Iterator[Conflict]:
    if ledger.init is not None and not ledger.init.enable_prefix_caching:
        yield Conflict(Fact("event", ev.tag_of(event)), Fact("enable_prefix_caching", value=False))


def _whole_prefix(ledger: Ledger, event: ev.BlocksAllocate) -> Iterator[Conflict]:
    """All cached blocks of a prompt are used before a new block is allocated."""
    seq_id = event.seq_ids[0]
    index = len(ledger.seq(seq_id).block_table)
    if ledger.init is None or not ledger.init.enable_prefix_caching:
        return
    if index >= (len(ledger.seq(seq_id).token_ids) - 1) // ledger.state.block_size:
        return
    chain_hash = ledger.chain_hash(seq_id, index)
    block = ledger.state.cached_blocks.get(chain_hash)
    if block is not None or chain_hash in ledger.evicted.values():
        yield Conflict(Fact("block_ids", event.block_ids[0]), Fact("cached_page", block))


def _table_after_admission(ledger: Ledger, event: ev.BlocksAllocate) -> Iterator[Conflict]:
    seq = ledger.seq(event.seq_ids[0])
    expected = ledger.blocks_for(len(seq.token_ids))
    yield from differ("block_ids", len(seq.block_table), "pages_for_tokens", expected)


def _appended(ledger: Ledger, event: ev.BlocksAppend) -> Iterator[Conflict]:
    """One block each, in the running queue's order, only if the newest token has none."""
    need = [
        seq_id
        for seq_id in ledger.state.running
        if not ledger.is_prefilling(seq_id) and ledger.needs_block(seq_id)
    ]
    yield from differ("seq_ids", event.seq_ids, "in_need_of_page", need[: len(event.seq_ids)])
    counts = [len(blocks) for blocks in event.block_ids]
    yield from differ("block_ids", counts, "one_page_each", [1] * len(counts))


def _tables(ledger: Ledger, _event: ev.Event) -> Iterator[Conflict]:
    """Each request of the batch has exactly the blocks for its tokens."""
    if ledger.step is None:
        return
    for seq_id in ledger.step.num_scheduled:
        seq = ledger.seq(seq_id)
        expected = ledger.blocks_for(len(seq.token_ids))
        if len(seq.block_table) != expected:
            table = Fact("table", [seq_id, [*seq.block_table]])
            yield Conflict(table, Fact("pages_for_tokens", expected))
            return


def _hashed(ledger: Ledger, event: ev.BlocksHash) -> Iterator[Conflict]:
    """A block is hashed when all its tokens are computed, by these tokens."""
    yield from _caching(ledger, event)
    size = ledger.state.block_size
    for seq_id, blocks, hashes in zip(event.seq_ids, event.block_ids, event.hashes, strict=True):
        seq = ledger.seq(seq_id)
        for block, recorded in zip(blocks, hashes, strict=True):
            if block not in seq.block_table:
                yield Conflict(
                    Fact("block_ids", block), Fact("table", [seq_id, [*seq.block_table]])
                )
                continue
            index = seq.block_table.index(block)
            if (index + 1) * size > seq.num_computed_tokens:
                found = Fact("block_ids", block)
                yield Conflict(found, Fact("num_computed", [seq_id, seq.num_computed_tokens]))
                continue
            yield from differ(
                "hashes", recorded, "hash_of_tokens", ledger.chain_hash(seq_id, index)
            )
            if block in ledger.state.block_hashes or recorded in ledger.state.cached_blocks:
                yield Conflict(Fact("hashes", recorded), Fact("already_published", block))


def _all_hashed(ledger: Ledger, _event: ev.StepEnd) -> Iterator[Conflict]:
    """The blocks that became full in this step are in the cache."""
    step, size = ledger.step, ledger.state.block_size
    if step is None or ledger.init is None or not ledger.init.enable_prefix_caching:
        return
    for seq_id, start in step.num_computed.items():
        stop = start + step.num_scheduled[seq_id]
        for index in range(start // size, stop // size):
            chain_hash = ledger.chain_hash(seq_id, index)
            if chain_hash not in ledger.state.cached_blocks:
                full = Fact("full_page", [seq_id, index])
                yield Conflict(full, Fact("hash_of_tokens", chain_hash))
                return


def _freed(ledger: Ledger, event: ev.BlocksRelease) -> Iterator[Conflict]:
    """The released blocks that no other request holds become free."""
    counts = ledger.state.ref_counts
    for seq_id, blocks, freed in zip(event.seq_ids, event.block_ids, event.freed, strict=True):
        table = ledger.seq(seq_id).block_table
        yield from differ("block_ids", blocks, "table_reversed", table[::-1])
        expected = [block for block in blocks if counts[block] == 1]
        yield from differ("freed", freed, "held_by_nobody_else", expected)


def _held(state: State) -> Counter[int]:
    """The number of block tables of each block that is in one."""
    return Counter(
        chain.from_iterable(state.sequences[seq_id].block_table for seq_id in state.running)
    )


def _conserved(ledger: Ledger, event: ev.Event) -> Iterator[Conflict]:
    """Every block is in a block table or in the free list, and not in both."""
    if isinstance(event, ev.StepEnd) and not (ledger.step and ledger.step.has_block_changes):
        return
    state = ledger.state
    held = _held(state)
    num_free = len(state.free_blocks)
    if len(held) + num_free != state.num_blocks:
        blocks = Fact("free_and_held", [num_free, len(held)])
        yield Conflict(blocks, Fact("num_blocks", state.num_blocks))
    both = sorted(block for block in held if block in state.free_blocks)
    if both:
        yield Conflict(Fact("held_pages", both), Fact("free_pages", both))


def _counted(ledger: Ledger, event: ev.Event) -> Iterator[Conflict]:
    if isinstance(event, ev.StepEnd) and not (ledger.step and ledger.step.has_block_changes):
        return
    state = ledger.state
    held = _held(state)
    for block, count in held.items():
        if state.ref_counts[block] != count:
            yield Conflict(
                Fact("ref_count", [block, state.ref_counts[block]]), Fact("tables", count)
            )
            return


def _free_blocks(ledger: Ledger, event: ev.StepEnd) -> Iterator[Conflict]:
    yield from differ("free_blocks", event.free_blocks, "free_pages", len(ledger.state.free_blocks))


_REUSES = (ev.BlocksShare, ev.BlocksRevive)
_TAKES = (ev.BlocksAllocate, ev.BlocksAppend)
RULES = (
    Rule("free_list", "before", _TAKES, _from_head),
    Rule("eviction", "before", _TAKES, _emptied),
    Rule("eviction", "before", (ev.BlocksEvict,), _evict),
    Rule("ref_counts", "before", _REUSES, _ref_count_of_reused),
    Rule("hash_chain", "before", _REUSES, _hash_of_reused),
    Rule("hash_chain", "before", (ev.BlocksHash,), _hashed),
    Rule("cache_use", "before", (ev.BlocksAllocate,), _whole_prefix),
    Rule("cache_use", "after", (ev.StepEnd,), _all_hashed),
    Rule("table_length", "after", (ev.BlocksAllocate,), _table_after_admission),
    Rule("table_length", "before", (ev.BlocksAppend,), _appended),
    Rule("table_length", "after", ev.SCHEDULES, _tables),
    Rule("ref_counts", "before", (ev.BlocksRelease,), _freed),
    Rule("conservation", "after", (*ev.SCHEDULES, ev.StepEnd), _free_blocks),
    Rule("conservation", "after", (ev.StepEnd, ev.GenerateFinish), _conserved),
    Rule("ref_counts", "after", (ev.StepEnd,), _counted),
)
