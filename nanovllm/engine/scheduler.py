"""Scheduler: which sequences run in this step, and why the others do not.

It has two queues and three budgets (tokens per step, running sequences, free blocks), and decides
when a sequence ends. It needs no tensors and no model. vLLM's counterpart is
`vllm/v1/core/sched/scheduler.py`.

    arrivals -> waiting [w0 w1 w2 ...]                 hold no block
                   | admitted, from the head    ^ preempted, to the head
                   v                            |
                running [r0 r1 ... rN]                 hold blocks for their tokens, except
                                         |             perhaps for the newest one
                                         | eos, stop_token, stop_string, max_tokens, max_model_len
                                         v
                                      finished

A policy chooses what goes into a step (`policies.py`). The default, as in the article that this
project follows (docs/en/article.md): a prefill if a prompt is computed in part or a request can be
admitted, else a decode. New requests come first, because each one joins every later decode step,
and a larger batch makes better use of the device. When a decode runs out of blocks, the
youngest running sequence (the tail) is preempted: it gives up its blocks and is computed again
later.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from nanovllm.engine.batch import Batch
from nanovllm.engine.policies import Policy, prefill_first
from nanovllm.engine.sequence import FinishReason, Sequence, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Container

    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.observer import Observer


class Scheduler:
    """Continuous batching over a pool of KV blocks.

    Args:
        block_manager: the pool.
        max_num_seqs: maximum number of running sequences.
        max_num_batched_tokens: maximum number of tokens computed in a step.
        max_model_len: maximum length of prompt and completion together.
        eos_token_ids: any of these ends a sequence.
        observer: called after every decision.
        policy: fills the batch of a step.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        observer: Observer,
        policy: Policy = prefill_first,
    ) -> None:
        self.policy = policy
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.observer = observer
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def is_finished(self) -> bool:
        """Are both queues empty?"""
        return not self.waiting and not self.running

    # -- arrival ---------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a request that `check_fits` (utils/input_processor.py) has accepted."""
        params = seq.sampling_params
        seq.max_num_tokens = min(seq.max_num_tokens, self.max_model_len)
        seq.end_token_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            seq.end_token_ids |= self.eos_token_ids
        self.waiting.append(seq)
        waiting_len = len(self.waiting)
        self.observer.request_enqueue(seq, waiting_len)

    # -- one step: schedule, then (after the model ran) postprocess -------------------------------

    def schedule(self) -> Batch:
        """Choose the batch of this step, by the policy.

        Raises:
            RuntimeError: the policy chose no sequence.
        """
        batch = Batch(self.max_num_batched_tokens)
        self.policy(self, batch)
        if not batch:
            raise RuntimeError(
                f"the policy chose no request: {len(self.waiting)} wait and {len(self.running)} run"
            )
        match batch.phase:
            case "prefill":
                self.observer.schedule_prefill(batch, self)
            case "decode":
                self.observer.schedule_decode(batch, self)
            case "mixed":
                self.observer.schedule_mixed(batch, self)
        return batch

    # The parts of a policy. Each adds to the batch what the budgets allow.

    def continue_prefill(self, batch: Batch) -> None:
        """Add the next chunk of a prompt that was longer than what was left of a step's budget.

        It is the last in the running queue: it used up the budget, so no request was admitted after
        it.
        """
        if self.running and self.running[-1].is_prefilling and batch.token_budget:
            batch.add(self.running[-1])

    def admit(self, batch: Batch, *, chunk_any: bool = False) -> None:
        """Admit requests from the head of the waiting queue, until a budget is used up.

        Strictly in order: if the head must wait, those behind it wait too.

        Args:
            batch: the step's batch so far.
            chunk_any: cut any prompt that does not fit into what is left of the budget. If False,
                only the first prompt of a step is cut; another waits for a step that it fits into,
                or in which it is the first.
        """
        while self.waiting and self._admit_head(batch, chunk_any):
            batch.add(self.running[-1])

    def decode(self, batch: Batch) -> None:
        """Add one token of each running sequence whose prefill is complete, oldest first.

        As far as the budget goes. Preempt the youngest if blocks run out.

        Raises:
            ValueError: the batch is not empty; what is in it might have to be preempted.
        """
        if batch:
            raise ValueError("a policy must call decode() before anything else fills the batch")
        needs_block = self.block_manager.needs_block
        index = 0
        while index < len(self.running) and batch.token_budget:
            seq = self.running[index]
            index += 1
            if seq.is_prefilling or (needs_block(seq) and not self._make_room(seq)):
                continue
            batch.add_decode(seq)

    def hold(self, reason: str) -> None:
        """Report that this step admits nothing, for a policy that does not call `admit`."""
        if self.waiting:
            head, num_running = self.waiting[0], len(self.running)
            self.observer.admission_stop(self, head, reason, num_running, 0)

    def postprocess(
        self, batch: Batch, token_ids: list[int], stopped: Container[Sequence] = ()
    ) -> list[Sequence]:
        """Update the sequences after the model has computed the batch.

        Args:
            batch: what `schedule` returned.
            token_ids: one sampled token for each of `batch.sampled_seqs`.
            stopped: those whose text has reached a stop string with this token.

        Returns:
            The sequences that ended in this step.
        """
        for seq, num_tokens in zip(batch.seqs, batch.num_scheduled_tokens, strict=True):
            num_computed_before = seq.num_computed_tokens
            seq.num_computed_tokens += num_tokens
            self.block_manager.hash_full_blocks(seq, num_computed_before)
        finished = []
        for seq, token_id in zip(batch.sampled_seqs, token_ids, strict=True):
            seq.token_ids.append(token_id)  # its K and V are computed when it is scheduled next
            reason = "stop_string" if seq in stopped else self._finish_reason(seq, token_id)
            if reason is not None:
                self.running.remove(seq)
                self._finish(seq, reason)
                finished.append(seq)
        return finished

    def _finish_reason(self, seq: Sequence, token_id: int) -> FinishReason | None:
        if token_id not in seq.end_token_ids and len(seq.token_ids) < seq.max_num_tokens:
            return None
        params = seq.sampling_params
        if token_id in self.eos_token_ids and not params.ignore_eos:
            return "eos"
        if params.stop_token_ids and token_id in params.stop_token_ids:
            return "stop_token"
        if seq.num_completion_tokens >= params.max_tokens:
            return "max_tokens"
        return "max_model_len"  # all that is left

    # -- leaving ---------------------------------------------------------------------------------

    def abort(self, seq: Sequence) -> None:
        """End a waiting or running request between two steps, and free its blocks."""
        (self.waiting if seq.status is SequenceStatus.WAITING else self.running).remove(seq)
        self.observer.request_abort(seq)
        self._finish(seq, "aborted")

    def reset(self, seqs: list[Sequence]) -> None:
        """End all of `seqs`, empty both queues, and make every block free and empty.

        This works after an exception at any point: it does not rely on the state before.
        """
        self.waiting.clear()
        self.running.clear()
        self.block_manager.reset()
        for seq in seqs:
            seq.block_table = []
            seq.num_computed_tokens = seq.num_cached_tokens = seq.num_prefill_tokens = 0
            seq.status = SequenceStatus.FINISHED
            seq.finish_reason = "aborted"
        self.observer.engine_reset(seqs)

    # -- inside ----------------------------------------------------------------------------------

    def _admit_head(self, batch: Batch, chunk_any: bool) -> bool:
        """Admit the head of the waiting queue. False if it must wait."""
        seq = self.waiting[0]
        if len(self.running) >= self.max_num_seqs:
            need = len(self.running) + 1
            self.observer.admission_stop(self, seq, "max_num_seqs", need, self.max_num_seqs)
            return False
        prefix = self.block_manager.match_prefix(seq)
        need = self.block_manager.num_blocks_to_take(seq, prefix)
        have = self.block_manager.num_free_blocks
        if need > have:
            self.observer.admission_stop(self, seq, "no_blocks", need, have)
            return False
        need = seq.num_tokens - len(prefix) * self.block_manager.block_size
        is_cut_allowed = batch.token_budget > 0 and (chunk_any or batch.num_prefills == 0)
        if need > batch.token_budget and not is_cut_allowed:
            # Longer than any step's budget: it can only be cut, as the first prompt of a step.
            fits_a_step = chunk_any or need <= self.max_num_batched_tokens
            reason = "token_budget" if fits_a_step else "chunk_not_first"
            self.observer.admission_stop(self, seq, reason, need, batch.token_budget)
            return False
        self.waiting.popleft()
        self.running.append(seq)
        self.block_manager.allocate(seq, prefix)
        seq.num_prefill_tokens = seq.num_tokens
        self._move(seq, SequenceStatus.RUNNING, "admitted")
        return True

    def _make_room(self, seq: Sequence) -> bool:
        """Give `seq` one more block, preempting if none is free. False if `seq` was preempted."""
        while not self.block_manager.can_append(seq):
            victim = self.running.pop()
            self._preempt(victim, for_seq=seq)
            if victim is seq:  # it is the youngest itself: the older ones keep their blocks
                return False
        self.block_manager.may_append(seq)
        return True

    def _preempt(self, victim: Sequence, for_seq: Sequence) -> None:
        """Take the blocks of `victim` so that `for_seq` can go on. Its tokens are kept."""
        num_computed_tokens = victim.num_computed_tokens
        freed = self.block_manager.deallocate(victim)
        self.waiting.appendleft(victim)
        self.observer.preempt(victim, for_seq, freed, num_computed_tokens)
        self._move(victim, SequenceStatus.WAITING, "preempted")

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.block_table:
            self.block_manager.deallocate(seq)
        seq.finish_reason = reason
        self._move(seq, SequenceStatus.FINISHED, reason)

    def _move(self, seq: Sequence, status: SequenceStatus, reason: str) -> None:
        previous, seq.status = seq.status, status
        self.observer.state_transition(seq, previous, reason)

    def check(self) -> None:
        """Assert the invariants of queues and pool. For tests and debugging.

        Raises:
            AssertionError: queues, statuses, tables and limits do not agree.
        """
        self.block_manager.check([*self.waiting, *self.running])
        assert len(self.running) <= self.max_num_seqs, f"{len(self.running)} are running"
        assert not {*self.waiting} & {*self.running}, "a sequence is in both queues"
        for seq in self.waiting:
            assert seq.status is SequenceStatus.WAITING, f"{seq} waits"
            assert not seq.block_table, f"{seq} waits but holds blocks"
        for seq in self.running:
            assert seq.status is SequenceStatus.RUNNING, f"{seq} runs"
            assert 0 <= seq.num_computed_tokens < seq.num_tokens, f"{seq} has nothing to compute"
            held = len(seq.block_table) * self.block_manager.block_size
            assert held >= seq.num_tokens - 1, f"{seq} has more tokens than its blocks hold"
            assert seq.num_tokens < self.max_model_len, f"{seq} is past max_model_len"
