"""The scheduler over random workloads: what holds after every step, and what comes out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import given

from support.fake_runner import Settings, runner_of
from support.witness import Witness
from support.workload import Run, Workload, workloads

if TYPE_CHECKING:
    from nanovllm.engine.batch import Batch
    from support.fake_runner import Moment


class Judge:
    """Looks at the queues before and after each schedule(), and after each step."""

    def __init__(self, workload: Workload) -> None:
        self.witness = Witness()
        self.run = Run(workload, self.witness)
        self.scheduler = self.run.engine.scheduler
        self.settings = workload.settings
        runner_of(self.run.engine).at = self._at
        self._remember()

    def _remember(self) -> None:
        self.waiting_before = [seq.seq_id for seq in self.scheduler.waiting]
        self.running_before = [seq.seq_id for seq in self.scheduler.running]
        self.num_preempted = len(self.witness.preempted)
        self.num_admitted = len(self.witness.admitted)

    def _at(self, moment: Moment, batch: Batch) -> None:
        if moment != "scheduled":
            return
        self.scheduler.block_manager.check([*self.scheduler.waiting, *self.scheduler.running])
        self._every_request_is_in_one_place()
        if self.settings.policy == "mixed":
            self._judge_mixed(batch)
        elif batch.phase == "prefill":
            self._judge_prefill(batch)
        else:
            self._judge_decode(batch)
        if self.settings.policy == "static" and self._running_then():
            assert self.witness.admitted[self.num_admitted :] == []

    def _judge_mixed(self, batch: Batch) -> None:
        assert sum(batch.num_scheduled_tokens) <= self.settings.max_num_batched_tokens
        num_decodes = len(batch.seqs) - batch.num_prefills
        assert not any(seq.is_prefilling for seq in batch.seqs[:num_decodes])
        assert all(seq.is_prefilling for seq in batch.seqs[num_decodes:])
        assert [*batch.seqs] == self.scheduler.running[: len(batch.seqs)], "in the queue's order"
        pieces = zip(batch.seqs, batch.num_scheduled_tokens, strict=True)
        is_chunk = [num_tokens < seq.num_uncomputed_tokens for seq, num_tokens in pieces]
        assert not any(is_chunk[:-1]), "a chunk uses the budget up"
        victims = [victim for victim, _ in self.witness.preempted[self.num_preempted :]]
        admitted = self.witness.admitted[self.num_admitted :]
        waiting, running = self._queues()
        # Victims stand before all others; from there the head is admitted, in order.
        assert admitted + waiting == victims[::-1] + self._waiting_now_and_then()
        assert running == self._running_then()[: len(running) - len(admitted)] + admitted

    def _judge_prefill(self, batch: Batch) -> None:
        assert sum(batch.num_scheduled_tokens) <= self.settings.max_num_batched_tokens
        pieces = list(zip(batch.seqs, batch.num_scheduled_tokens, strict=True))
        for seq, num_tokens in pieces:
            assert 1 <= num_tokens <= seq.num_uncomputed_tokens
        is_chunk = [num_tokens < seq.num_uncomputed_tokens for seq, num_tokens in pieces]
        assert not any(is_chunk[1:]), "only the first of a batch may be a chunk"
        assert not is_chunk[0] or len(batch.seqs) == 1, "a chunk takes the whole budget"
        assert batch.sampled_seqs == ([] if is_chunk[0] else batch.seqs)
        # Nobody overtakes: those admitted were the waiting queue's head, in its order.
        admitted = self.witness.admitted[self.num_admitted :]
        waiting, running = self._queues()
        assert admitted + waiting == self._waiting_now_and_then()
        assert running == self._running_then() + admitted
        assert len(self.witness.preempted) == self.num_preempted

    def _judge_decode(self, batch: Batch) -> None:
        victims = [victim for victim, _ in self.witness.preempted[self.num_preempted :]]
        waiting, running = self._queues()
        # Victims leave the tail one by one, and stand before all others in their old order.
        assert running + victims[::-1] == self._running_then()
        assert waiting == victims[::-1] + self._waiting_now_and_then()
        # Everybody who runs goes one token further, as far as the budget reaches.
        assert [seq.seq_id for seq in batch.seqs] == running[: self.settings.max_num_batched_tokens]
        assert batch.sampled_seqs == batch.seqs
        assert batch.num_scheduled_tokens == [1] * len(batch.seqs)
        assert all(seq.num_uncomputed_tokens == 1 for seq in batch.seqs)

    def _queues(self) -> tuple[list[int], list[int]]:
        waiting = [seq.seq_id for seq in self.scheduler.waiting]
        return waiting, [seq.seq_id for seq in self.scheduler.running]

    def _waiting_now_and_then(self) -> list[int]:
        """The waiting queue before schedule(): as it was after the step before, then arrivals."""
        alive = self.run.engine.requests
        before = [seq_id for seq_id in self.waiting_before if seq_id in alive]
        arrived = [seq_id for seq_id in alive if seq_id not in self.waiting_before]
        return before + [seq_id for seq_id in arrived if seq_id not in self.running_before]

    def _running_then(self) -> list[int]:
        return [seq_id for seq_id in self.running_before if seq_id in self.run.engine.requests]

    def _every_request_is_in_one_place(self) -> None:
        waiting, running = self._queues()
        for seq_id, seq in self.run.sequences.items():
            places = waiting.count(seq_id) + running.count(seq_id) + seq.is_finished
            assert places == 1, f"{seq} is in {places} places"

    def after_step(self) -> None:
        self.scheduler.check()
        self._every_request_is_in_one_place()
        for seq in self.run.sequences.values():
            assert seq.num_tokens <= self.settings.max_model_len
            assert not (seq.is_finished and seq.block_table)
        self._remember()


@given(workloads())
def test_every_step_of_any_workload_keeps_the_rules(workload: Workload) -> None:
    judge = Judge(workload)
    judge.run.go(judge.after_step)
    assert not judge.run.engine.requests
    pool = judge.scheduler.block_manager
    assert pool.num_free_blocks == pool.num_blocks, "a page was lost"


@given(workloads())
def test_check_holds_after_every_schedule_and_every_postprocess(workload: Workload) -> None:
    run = Run(workload)
    runner_of(run.engine).at = lambda _moment, _batch: run.engine.scheduler.check()
    run.go(run.engine.scheduler.check)


@given(workloads())
def test_every_request_gets_its_own_answer_whoever_runs_beside_it(workload: Workload) -> None:
    run = Run(workload).go()
    for index, request in enumerate(workload.requests):
        assert (index in run.seq_ids) == request.can_fit(workload.settings)
        if index not in run.seq_ids:
            continue
        seq = run.sequences[run.seq_ids[index]]
        tokens, reason = request.answer(workload.settings.max_model_len)
        if seq.finish_reason == "aborted":
            assert request.abort is not None
            assert seq.completion_token_ids == tokens[: seq.num_completion_tokens]
        else:
            assert (seq.completion_token_ids, seq.finish_reason) == (tokens, reason)


@given(workloads(with_aborts=False))
def test_answers_are_those_of_a_huge_pool_and_budget(workload: Workload) -> None:
    model_len = workload.settings.max_model_len
    accepted = [r for r in workload.requests if r.can_fit(workload.settings)]
    if not accepted:
        return
    small = Run(replace(workload, requests=accepted)).go()
    huge = Run(Workload(Settings(max_model_len=model_len), accepted)).go()
    for index in range(len(accepted)):
        seq, same = small.sequences[small.seq_ids[index]], huge.sequences[huge.seq_ids[index]]
        assert (seq.token_ids, seq.finish_reason) == (same.token_ids, same.finish_reason)


@given(workloads())
def test_no_workload_goes_round_in_circles(workload: Workload) -> None:
    """Each token costs one decode step, or at most one prefill in chunks; so steps are bounded."""
    settings = workload.settings
    num_chunks = -(-settings.max_model_len // settings.max_num_batched_tokens)
    bound = sum((request.max_tokens + 1) * num_chunks for request in workload.requests)
    run = Run(workload)
    run.go(lambda: _at_most(run.num_steps, bound))


def _at_most(num_steps: int, bound: int) -> None:
    assert num_steps <= bound
