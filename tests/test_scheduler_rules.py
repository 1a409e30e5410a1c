"""The scheduler, rule by rule."""

from __future__ import annotations

import pytest

from nanovllm.engine.policies import POLICIES
from nanovllm.engine.sequence import SequenceStatus
from nanovllm.errors import RequestRefusedError
from support.fake_runner import EOS_TOKEN_IDS, Settings, runner_of
from support.witness import Witness, add, engine_with
from support.workload import Request, Run, Workload


def test_no_more_than_max_num_seqs_run_at_once() -> None:
    witness = Witness()
    engine = engine_with(witness, 3, 4, max_num_seqs=2, max_model_len=20)
    engine.step()
    assert not witness.stops
    third = add(engine, 3)
    engine.step()
    assert witness.stops == [(2, "max_num_seqs", 3, 2)]
    assert witness.batches[-1] == ("decode", [0, 1], [1, 1])
    assert third.status is SequenceStatus.WAITING
    assert not third.block_table
    engine.abort(0)
    engine.step()
    assert witness.batches[-1] == ("prefill", [2], [3])


def test_the_head_waits_for_blocks_and_says_how_many() -> None:
    witness = Witness()
    engine = engine_with(
        witness, 9, 5, 1, kvcache_block_size=4, num_kvcache_blocks=4, max_model_len=12
    )
    engine.step()  # 9 tokens take 3 pages of 4; 5 tokens need 2, and 1 is left
    assert witness.stops == [(1, "no_blocks", 2, 1)]
    assert witness.batches == [("prefill", [0], [9])]  # 1 token would fit, but does not overtake


def test_blocks_shared_with_a_running_sequence_are_not_counted_as_needed() -> None:
    witness = Witness()
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 5]
    engine = engine_with(
        witness,
        prompt,
        kvcache_block_size=4,
        num_kvcache_blocks=4,
        max_model_len=12,
        enable_prefix_caching=True,
    )
    engine.step()
    add(engine, [*prompt, 5])
    engine.step()
    assert witness.cached == [0, 8]  # two pages shared, so one page is enough
    assert not witness.stops


def test_the_head_waits_for_a_step_with_budget_left() -> None:
    witness = Witness()
    engine = engine_with(witness, 6, 5, max_num_batched_tokens=10)
    engine.step()
    assert witness.stops == [(1, "token_budget", 5, 4)]
    engine.step()
    assert [batch[0:2] for batch in witness.batches] == [("prefill", [0]), ("prefill", [1])]


def test_a_prompt_longer_than_a_budget_must_be_the_first_of_its_step() -> None:
    witness = Witness()
    engine = engine_with(witness, 6, 11, max_num_batched_tokens=10)
    engine.step()
    assert witness.stops == [(1, "chunk_not_first", 11, 4)]
    for _ in range(2):
        engine.step()
    assert witness.batches[1:] == [("prefill", [1], [10]), ("prefill", [1], [1])]


def test_a_long_prompt_is_computed_in_chunks_and_sampled_after_the_last() -> None:
    witness = Witness()
    engine = engine_with(witness, 10, 2, max_num_batched_tokens=4)
    seq = engine.requests[0]
    for num_computed in (4, 8):
        engine.step()
        assert (seq.num_computed_tokens, seq.num_completion_tokens) == (num_computed, 0)
        assert seq.is_prefilling
    engine.step()
    assert witness.batches == [
        ("prefill", [0], [4]),
        ("prefill", [0], [4]),
        ("prefill", [0, 1], [2, 2]),  # what the last chunk leaves over is used
    ]
    assert (seq.num_computed_tokens, seq.num_completion_tokens) == (10, 1)
    assert not seq.is_prefilling


def test_a_step_never_computes_more_tokens_than_the_budget() -> None:
    witness = Witness()
    engine = engine_with(witness, 1, 1, 1, max_num_batched_tokens=2)
    for _ in range(4):
        engine.step()
    assert max(sum(num_tokens) for _, _, num_tokens in witness.batches) <= 2


def test_new_requests_come_before_decoding() -> None:
    witness = Witness()
    engine = engine_with(witness, 3)
    engine.step()
    engine.step()
    add(engine, 2)
    engine.step()
    engine.step()
    assert [(phase, seq_ids) for phase, seq_ids, _ in witness.batches] == [
        ("prefill", [0]),
        ("decode", [0]),
        ("prefill", [1]),
        ("decode", [0, 1]),
    ]


def test_victims_leave_from_the_tail_and_come_back_in_their_order() -> None:
    witness = Witness()
    engine = engine_with(
        witness, 4, 2, 2, kvcache_block_size=2, num_kvcache_blocks=4, max_model_len=9
    )
    engine.step()
    assert [seq.seq_id for seq in engine.scheduler.running] == [0, 1, 2]
    waiting = add(engine, 2)
    engine.step()  # each needs a page and none is left: 2 gives way to 0, then to 1 itself
    assert witness.preempted == [(2, 0), (1, 1)]
    assert [seq.seq_id for seq in engine.scheduler.running] == [0]
    assert [seq.seq_id for seq in engine.scheduler.waiting] == [1, 2, waiting.seq_id]
    assert all(not seq.block_table for seq in engine.scheduler.waiting)
    while not engine.is_finished():
        engine.step()
    assert witness.admitted[3:] == sorted(witness.admitted[3:])


def test_a_new_block_is_taken_when_a_sequence_is_one_token_past_the_last() -> None:
    """The token is appended in postprocess, so the next schedule() sees len % block_size == 1."""
    engine = engine_with(Witness(), 3, kvcache_block_size=4)
    seq = engine.requests[0]
    lengths_and_pages = []
    runner_of(engine).at = lambda moment, batch: (
        lengths_and_pages.append((seq.num_tokens, len(batch.seqs[0].block_table)))
        if moment == "scheduled"
        else None
    )
    for _ in range(7):
        engine.step()
    assert lengths_and_pages == [(3, 1), (4, 1), (5, 2), (6, 2), (7, 2), (8, 2), (9, 3)]


def test_an_aborted_request_leaves_its_queue_and_its_blocks_at_once() -> None:
    witness = Witness()
    engine = engine_with(witness, 5, 5, max_num_seqs=1, kvcache_block_size=2)
    engine.step()
    running, waiting = engine.requests.values()
    pool = engine.scheduler.block_manager
    engine.abort(waiting.seq_id)
    engine.abort(running.seq_id)
    assert engine.is_finished()
    assert pool.num_free_blocks == pool.num_blocks
    for seq in (running, waiting):
        assert (seq.status, seq.finish_reason) == (SequenceStatus.FINISHED, "aborted")


def test_a_chunk_can_be_aborted_between_two_steps() -> None:
    engine = engine_with(Witness(), 10, 3, max_num_batched_tokens=4)
    engine.step()
    engine.abort(0)
    engine.step()
    engine.scheduler.check()
    assert [seq.seq_id for seq in engine.scheduler.running] == [1]


def test_reset_forgets_everything() -> None:
    prompts = ([1, 2, 3, 4, 5], [1, 2, 3], [4])
    engine = engine_with(
        Witness(), *prompts, max_num_seqs=2, kvcache_block_size=2, enable_prefix_caching=True
    )
    for _ in range(3):
        engine.step()
    assert engine.scheduler.block_manager.cached_blocks
    seqs = list(engine.requests.values())
    engine.scheduler.reset(seqs)
    engine.scheduler.check()
    assert engine.is_finished()
    pool = engine.scheduler.block_manager
    assert list(pool.free_blocks) == list(range(pool.num_blocks))
    assert not pool.cached_blocks
    for seq in seqs:
        assert (seq.status, seq.finish_reason) == (SequenceStatus.FINISHED, "aborted")
        assert not seq.block_table
        assert (seq.num_computed_tokens, seq.num_cached_tokens) == (0, 0)


# -- kinds 1, 3, 4, 6, 9 and 10 of the faults that engines like this one had -----------------------


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "need"), [(9, 1, 3), (8, 4, 3), (8, 2, 3), (100, 1, 25)]
)
def test_what_can_never_fit_the_pool_is_refused_and_changes_nothing(
    prompt_len: int, max_tokens: int, need: int
) -> None:
    engine = engine_with(Witness(), kvcache_block_size=4, num_kvcache_blocks=2)
    with pytest.raises(
        RequestRefusedError, match=f"{need} blocks of 4 tokens, but the pool has 2"
    ) as told:
        add(engine, prompt_len, max_tokens)
    assert (told.value.reason, told.value.need, told.value.have) == ("never_fits", need, 2)
    assert engine.is_finished()
    assert not engine.requests
    assert engine.num_requests == 0


def test_what_just_fits_the_pool_is_taken_and_finishes() -> None:
    engine = engine_with(Witness(), kvcache_block_size=4, num_kvcache_blocks=2)
    whole = add(engine, 8, max_tokens=1)
    grown = add(engine, 3, max_tokens=6)  # its last token is sampled, and needs no place
    while not engine.is_finished():
        engine.step()
    assert (whole.num_completion_tokens, grown.num_completion_tokens) == (1, 6)


def test_a_refused_request_leaves_the_others_alone() -> None:
    engine = engine_with(Witness(), kvcache_block_size=4, num_kvcache_blocks=2)
    small = add(engine, 3, max_tokens=2)
    with pytest.raises(RequestRefusedError):
        add(engine, 9, max_tokens=1)
    while not engine.is_finished():
        engine.step()
    assert small.finish_reason == "max_tokens"


@pytest.mark.parametrize("prompt_len", [8, 9])
def test_a_prompt_that_leaves_no_room_in_max_model_len_is_refused(prompt_len: int) -> None:
    engine = engine_with(Witness(), max_model_len=8, kvcache_block_size=4)
    with pytest.raises(RequestRefusedError, match="max_model_len=8") as told:
        add(engine, prompt_len, max_tokens=2)
    assert told.value.reason == "prompt_too_long"
    assert (told.value.need, told.value.have) == (prompt_len + 1, 8)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "num_completion_tokens", "reason"),
    [(7, 1, 1, "max_tokens"), (7, 2, 1, "max_model_len"), (3, 50, 5, "max_model_len")],
)
def test_nobody_runs_past_max_model_len(
    prompt_len: int, max_tokens: int, num_completion_tokens: int, reason: str
) -> None:
    engine = engine_with(Witness(), max_model_len=8, kvcache_block_size=4, num_kvcache_blocks=2)
    seq = add(engine, prompt_len, max_tokens)
    widths = [0]
    while not engine.is_finished():
        engine.step()
        widths.append(len(seq.block_table))
    assert (seq.num_completion_tokens, seq.finish_reason) == (num_completion_tokens, reason)
    assert max(widths) <= 2


def test_a_preempted_request_with_a_prefix_hit_computes_no_more_than_it_has() -> None:
    witness = Witness()
    requests = [Request([1, 2, 3, 4], 6), Request([1, 2, 3, 4, 5], 5)]
    settings = Settings(kvcache_block_size=2, num_kvcache_blocks=6)
    run = Run(Workload(settings, requests), witness).go()  # FakeRunner checks every position
    assert witness.preempted
    assert any(witness.cached[2:]), "nobody came back with a prefix hit"
    for index, request in enumerate(requests):
        assert run.sequences[index].completion_token_ids == request.answer()[0]


@pytest.mark.parametrize("is_caching", [True, False])
def test_being_preempted_twice_changes_no_token(*, is_caching: bool) -> None:
    witness = Witness()
    requests = [Request([1, 2, 3], 14), Request([2, 2], 12), Request([3, 1], 12)]
    settings = Settings(
        kvcache_block_size=2, num_kvcache_blocks=9, enable_prefix_caching=is_caching
    )
    run = Run(Workload(settings, requests), witness).go()
    victims = [victim for victim, _ in witness.preempted]
    assert max(victims.count(victim) for victim in victims) >= 2
    for index, request in enumerate(requests):
        assert run.sequences[index].completion_token_ids == request.answer()[0]


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 10000])
def test_chunk_boundaries_change_no_token(budget: int) -> None:
    requests = [Request([1, 2, 3, 4, 5, 1, 2, 3, 4], 5), Request([2] * 7, 6), Request([3], 4)]
    run = Run(Workload(Settings(max_num_batched_tokens=budget), requests)).go()
    for index, request in enumerate(requests):
        assert run.sequences[index].completion_token_ids == request.answer()[0]


def test_every_end_of_sequence_token_ends_a_request_unless_ignored() -> None:
    ended_by = set()
    for first in range(1, 6):
        for second in range(1, 6):
            request = Request([first, second], 40, ignore_eos=False)
            seq = Run(Workload(Settings(), [request])).go().sequences[0]
            assert seq.finish_reason == request.answer()[1] == "eos"
            ended_by.add(seq.token_ids[-1])
    assert ended_by == {*EOS_TOKEN_IDS}


def test_a_policy_that_chooses_nobody_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(POLICIES, "idle", lambda _scheduler, _batch: None)
    engine = engine_with(Witness(), 3, 4, policy="idle")
    with pytest.raises(RuntimeError, match="chose no request: 2 wait and 0 run"):
        engine.step()
    assert engine.is_finished()
