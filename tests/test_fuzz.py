"""The fuzz is alive: it holds, it reaches every corner, it repeats, and it finds planted faults."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from nanovllm.engine import block_manager
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.scheduler import Scheduler
from support.fuzz import attempt, draw_case, examine, main

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Sequence

SEED = 1
ENOUGH = 60  # workloads within which each planted fault must show

CORNERS = {
    *("steps", "requests", "chunks", "preemptions", "prefix hits (blocks)", "evictions (blocks)"),
    *("refusals", "errors", "cache resets", "ended by aborted", "ended by eos"),
    *("ended by stop_token", "ended by stop_string", "ended by max_tokens"),
    "ended by max_model_len",
    "steps run ahead",
    "steps run ahead, not used",
}


def test_a_short_fuzz_holds_and_reaches_every_corner() -> None:
    total: Counter[str] = Counter()
    for index in range(ENOUGH):
        total += examine(draw_case(SEED, index))
    assert set(total) == CORNERS


def test_a_case_depends_on_its_seed_and_its_number_alone() -> None:
    case, tally = draw_case(SEED, 8), examine(draw_case(SEED, 8))
    assert (draw_case(SEED, 8), examine(draw_case(SEED, 8))) == (case, tally)
    assert len({str(draw_case(seed, index)) for seed in (1, 2) for index in (8, 9)}) == 4


# -- faults, planted one at a time -----------------------------------------------------------------

_allocate, _deallocate = BlockManager.allocate, BlockManager.deallocate
_preempt, _abort = Scheduler._preempt, Scheduler.abort
_finish_reason = Scheduler._finish_reason
_hash_block = block_manager.hash_block


def hashes_pages_before_they_are_computed(
    pool: BlockManager, seq: Sequence, prefix: list[int]
) -> None:
    _allocate(pool, seq, prefix)
    num_computed_tokens, seq.num_computed_tokens = seq.num_computed_tokens, seq.num_tokens
    pool.hash_full_blocks(seq, num_computed_tokens)
    seq.num_computed_tokens = num_computed_tokens


def frees_pages_that_others_hold(pool: BlockManager, seq: Sequence) -> list[int]:
    for block_id in seq.block_table:
        pool.ref_counts[block_id] = 1
    return _deallocate(pool, seq)


def puts_hashed_pages_at_the_head(pool: BlockManager, seq: Sequence) -> list[int]:
    freed = _deallocate(pool, seq)
    for block_id in freed:
        pool.free_blocks.move_to_end(block_id, last=False)
    return freed


def forgets_what_comes_before_a_block(_parent: bytes, token_ids: list[int]) -> bytes:
    return _hash_block(b"", token_ids)


def takes_revived_pages_for_shared_ones(
    pool: BlockManager, seq: Sequence, prefix: list[int]
) -> int:
    return pool.blocks_for(seq.num_tokens) - len(prefix)


def takes_the_page_of_the_next_token_too_late(pool: BlockManager, seq: Sequence) -> bool:
    return seq.num_tokens - 1 > len(seq.block_table) * pool.block_size


def sends_the_victim_to_the_end_of_the_queue(
    scheduler: Scheduler, victim: Sequence, for_seq: Sequence
) -> None:
    _preempt(scheduler, victim, for_seq)
    scheduler.waiting.rotate(-1)


def lets_every_sequence_grow_one_token_too_long(
    scheduler: Scheduler, seq: Sequence, token_id: int
) -> str | None:
    reason = _finish_reason(scheduler, seq, token_id)
    is_at_its_end = seq.num_completion_tokens == seq.sampling_params.max_tokens
    return None if is_at_its_end and reason == "max_tokens" else reason


def keeps_the_pages_of_the_aborted(scheduler: Scheduler, seq: Sequence) -> None:
    table, seq.block_table = seq.block_table, []
    _abort(scheduler, seq)
    seq.block_table = table


def keeps_the_text_of_the_ended(processor: OutputProcessor, seq: Sequence) -> str:
    return processor.tokenizer.decode(seq.completion_token_ids)


FAULTS: list[tuple[Any, str, Any]] = [
    (BlockManager, "allocate", hashes_pages_before_they_are_computed),
    (BlockManager, "deallocate", frees_pages_that_others_hold),
    (BlockManager, "deallocate", puts_hashed_pages_at_the_head),
    (block_manager, "hash_block", forgets_what_comes_before_a_block),
    (BlockManager, "num_blocks_to_take", takes_revived_pages_for_shared_ones),
    (BlockManager, "needs_block", takes_the_page_of_the_next_token_too_late),
    (Scheduler, "_preempt", sends_the_victim_to_the_end_of_the_queue),
    (Scheduler, "_finish_reason", lets_every_sequence_grow_one_token_too_long),
    (Scheduler, "abort", keeps_the_pages_of_the_aborted),
    (OutputProcessor, "finish", keeps_the_text_of_the_ended),
]


@pytest.mark.parametrize(("place", "name", "fault"), FAULTS, ids=[f.__name__ for *_, f in FAULTS])
def test_a_planted_fault_is_found(
    place: object, name: str, fault: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, fault)
    outcomes = (attempt(SEED, index) for index in range(ENOUGH))
    assert any(outcome.failure is not None for outcome in outcomes)


# -- the command line ------------------------------------------------------------------------------


def test_what_the_fuzz_went_through_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "5", "--seed", "1", "--jobs", "1"]) == 0
    first, *counts = capsys.readouterr().out.splitlines()
    assert first.startswith("5 workloads of seed 1: all held, in ")
    assert {line.split(maxsplit=1)[1] for line in counts} <= CORNERS


def test_several_processes_go_through_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for num_jobs in ("1", "2"):
        assert main(["--count", "5", "--seed", "1", "--jobs", num_jobs]) == 0
        said.append(capsys.readouterr().out.splitlines()[1:])
    assert said[0] == said[1]


def test_a_failure_says_how_to_repeat_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockManager, "deallocate", frees_pages_that_others_hold)
    assert main(["--count", str(ENOUGH), "--seed", "1", "--jobs", "1"]) == 1
    *_, failed, command = capsys.readouterr().out.splitlines()
    assert failed.endswith(" of seed 1 failed; the same one again:")
    *repeat, index = command.split()
    assert repeat == ["python", "-m", "support.fuzz", "--seed", "1", "--only"]
    with pytest.raises(AssertionError):
        main(["--seed", "1", "--only", index])
    assert capsys.readouterr().out.startswith("Case(workload=Workload(")
    monkeypatch.undo()
    assert main(["--seed", "1", "--only", index]) == 0
