"""What events say beside what they change: each number is the fold's own at that moment."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given

from nanovllm.engine.block_manager import hash_block
from nvtrace import events as ev
from nvtrace.envelope import Footer, Header
from nvtrace.replay import State
from support.recording import BUSY, BUSY_MIXED, Recording
from support.workload import Workload, workloads

if TYPE_CHECKING:
    from nvtrace.envelope import Record
    from support.fake_runner import Settings


class FactChecker:
    """Folds a trace, and holds every stated number against the state."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state = State()
        self.stop: ev.AdmissionStop | None = None  # for want of budget, in this step
        self.released: dict[int, tuple[int, int]] = {}  # seq_id -> tokens computed, pages freed
        self.ended: list[int] = []  # in this step
        self.started: list[int] = []  # admitted in this step

    def take(self, record: Record) -> None:
        """Apply a record and check what it says."""
        if isinstance(record, ev.BlocksRelease):
            for seq_id, freed in zip(record.seq_ids, record.freed, strict=True):
                num_computed = self.state.sequences[seq_id].num_computed_tokens
                self.released[seq_id] = (num_computed, len(freed))
        self.state.apply(record)
        self._check_queues(record)
        match record:
            case ev.SchedulePrefill():
                self._check_prefill(record)
            case ev.ScheduleMixed():
                self._check_mixed(record)
            case ev.ScheduleDecode():
                assert record.seq_ids == self.state.running[: record.token_budget]
                is_mixed = self.settings.policy == "mixed"  # decodes use the budget up as well
                self._check_schedule(record, record.scheduled if is_mixed else 0)
            case ev.Preempt():
                stated = (record.num_tokens_to_recompute, record.num_blocks_freed)
                assert stated == self.released[record.seq_id]
                assert record.for_seq_id in (record.seq_id, *self.state.running)
            case ev.StepEnd():
                self._check_step_end(record)
            case _:
                pass

    def _check_queues(self, record: Record) -> None:
        match record:
            case ev.RequestEnqueue():
                assert record.seq_id == self.state.waiting[-1]
                assert record.waiting_len == len(self.state.waiting)
                assert record.prompt_len == len(record.prompt_token_ids)
            case ev.RequestAbort():
                seq = self.state.sequences[record.seq_id]
                assert record.num_completion_tokens == seq.num_completion_tokens
            case ev.AdmissionStop():
                assert record.seq_id == self.state.waiting[0]
                assert record.waiting_len == len(self.state.waiting)
                self._check_stop(record)
            case ev.StateTransition():
                self._check_transition(record)
            case _:
                pass

    def _check_prefill(self, record: ev.SchedulePrefill) -> None:
        seqs = [self.state.sequences[seq_id] for seq_id in record.seq_ids]
        assert record.num_computed_tokens == [seq.num_computed_tokens for seq in seqs]
        assert record.num_cached_tokens == [seq.num_cached_tokens for seq in seqs]
        assert record.num_batched_tokens == sum(record.num_scheduled_tokens)
        continues = record.seq_ids[0] not in self.started
        assert record.reason == ("chunk_continues" if continues else "waiting_admissible")
        assert record.seq_ids[continues:] == self.started
        self._check_schedule(record, record.num_batched_tokens)

    def _check_mixed(self, record: ev.ScheduleMixed) -> None:
        seqs = [self.state.sequences[seq_id] for seq_id in record.seq_ids]
        assert record.num_computed_tokens == [seq.num_computed_tokens for seq in seqs]
        assert record.num_cached_tokens == [seq.num_cached_tokens for seq in seqs]
        assert record.num_batched_tokens == sum(record.num_scheduled_tokens)
        assert record.num_decodes + record.num_prefills == record.scheduled
        is_prefill = [seq.num_computed_tokens < seq.num_prefill_tokens for seq in seqs]
        assert is_prefill == [False] * record.num_decodes + [True] * record.num_prefills
        self._check_schedule(record, record.num_batched_tokens)

    def _check_schedule(
        self,
        record: ev.SchedulePrefill | ev.ScheduleDecode | ev.ScheduleMixed,
        num_batched_tokens: int,
    ) -> None:
        assert record.scheduled == len(record.seq_ids)
        assert record.token_budget == self.settings.max_num_batched_tokens
        assert record.engine_step == record.step
        self._check_lengths(record)
        if self.stop is not None:
            assert self.stop.have == record.token_budget - num_batched_tokens
        self.stop, self.started = None, []

    def _check_stop(self, stop: ev.AdmissionStop) -> None:
        need_tokens, need_blocks = self._needs(stop.seq_id)
        match stop.reason:
            case "max_num_seqs":
                assert stop.need == len(self.state.running) + 1
                assert stop.have == len(self.state.running) <= self.settings.max_num_seqs
            case "no_blocks":
                assert (stop.need, stop.have) == (need_blocks, len(self.state.free_blocks))
            case "token_budget":
                assert stop.need == need_tokens
                if self.settings.policy != "mixed":
                    assert stop.need <= self.settings.max_num_batched_tokens
                self.stop = stop  # what it has follows from the tokens scheduled in this step
            case "static_batch":
                assert self.settings.policy == "static"
                assert (stop.need, stop.have) == (len(self.state.running), 0)
            case "chunk_not_first":
                assert stop.need == need_tokens > self.settings.max_num_batched_tokens
                self.stop = stop
        assert stop.need > stop.have

    def _needs(self, seq_id: int) -> tuple[int, int]:
        """Tokens to compute and free pages to take, were this request admitted now."""
        tokens, size = self.state.sequences[seq_id].token_ids, self.state.block_size
        chain, num_cached, num_shared = b"", 0, 0
        for start in range(0, len(tokens) - size, size):
            chain = hash_block(chain, tokens[start : start + size])
            block_id = self.state.cached_blocks.get(chain.hex())
            if block_id is None:
                break
            num_cached += size
            num_shared += block_id not in self.state.free_blocks
        return len(tokens) - num_cached, -(-len(tokens) // size) - num_shared

    def _check_transition(self, record: ev.StateTransition) -> None:
        seq = self.state.sequences[record.seq_id]
        assert record.status == seq.status
        assert record.num_completion_tokens == seq.num_completion_tokens
        assert record.max_tokens == seq.max_tokens
        assert record.token_id == (seq.token_ids[-1] if seq.num_completion_tokens else None)
        if record.status == "RUNNING":
            self.started.append(record.seq_id)
        if record.status == "FINISHED" and record.reason != "aborted":
            self.ended.append(record.seq_id)

    def _check_step_end(self, record: ev.StepEnd) -> None:
        assert record.finished == self.ended
        self.ended = []
        self._check_lengths(record)
        times = [
            *(record.schedule_ns, record.prepare_ns, record.forward_ns),
            *(record.sample_ns, record.postprocess_ns),
        ]
        assert all(time >= 0 for time in times)
        assert sum(times) == record.wall_ns
        if record.batch_phase == "decode":
            assert record.num_tokens_stat == -record.num_seqs == -record.num_batched_tokens

    def _check_lengths(
        self, record: ev.SchedulePrefill | ev.ScheduleDecode | ev.ScheduleMixed | ev.StepEnd
    ) -> None:
        assert record.waiting_len == len(self.state.waiting)
        assert record.running_len == len(self.state.running)
        assert record.free_blocks == len(self.state.free_blocks)


@given(workloads())
@example(BUSY)
def test_every_number_in_a_trace_is_that_of_the_folded_state(workload: Workload) -> None:
    checker = FactChecker(workload.settings)
    for record in Recording(workload).records:
        checker.take(record)


@given(workloads())
@example(BUSY)
def test_events_are_numbered_without_gaps_and_in_the_order_of_their_times(
    workload: Workload,
) -> None:
    header, *events, footer = Recording(workload).records
    assert isinstance(header, Header)
    assert isinstance(footer, Footer)
    assert all(isinstance(event, ev.Event) for event in events)
    numbered = [event for event in events if isinstance(event, ev.Event)]
    assert [event.event_id for event in numbered] == list(range(1, len(events) + 1))
    assert (footer.event_id, footer.num_events) == (len(events) + 1, len(events))
    for event, following in pairwise(numbered):
        assert event.ts_ns <= following.ts_ns


@given(workloads())
@example(BUSY)
def test_each_step_runs_from_its_schedule_to_its_end_under_one_number(workload: Workload) -> None:
    recording = Recording(workload)
    steps = [r.step for r in recording.records if isinstance(r, ev.Event) and r.step is not None]
    assert steps == sorted(steps)
    assert {*steps} == set(range(1, recording.run.num_steps + 1))
    decode_index = 0
    for record in recording.records:
        if isinstance(record, ev.ScheduleDecode):
            assert record.decode_step_index == decode_index
            decode_index += 1
        if isinstance(record, ev.StepEnd) and record.batch_phase == "prefill":
            lengths = [record.num_tokens_stat, record.num_batched_tokens, record.num_seqs]
            assert lengths == sorted(lengths, reverse=True)


def test_a_prefill_counts_its_sequences_lengths_and_a_decode_minus_its_batch() -> None:
    ends = [record for record in Recording(BUSY).records if isinstance(record, ev.StepEnd)]
    first = ends[0]  # one prompt of 5 tokens and the first token of its answer
    assert (first.batch_phase, first.num_tokens_stat) == ("prefill", 6)
    assert all(end.num_tokens_stat < 0 for end in ends if end.batch_phase == "decode")


@pytest.mark.parametrize("workload", [BUSY, BUSY_MIXED], ids=["prefill_first", "mixed"])
def test_blocks_are_released_in_the_phase_that_releases_them(workload: Workload) -> None:
    recording = Recording(workload)
    events = [record for record in recording.records if isinstance(record, ev.Event)]
    for before, event in pairwise(events):
        if isinstance(event, ev.Preempt):
            assert before.phase == event.phase in {"decode", "mixed"}
        elif isinstance(event, ev.StateTransition) and event.status == "FINISHED":
            assert before.phase == event.phase == "postprocess" or event.reason == "aborted"
