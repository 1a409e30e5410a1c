"""Ledger: an engine's state from its trace, and all else that the rules need to check an event.

The state is the fold's (`nvtrace.replay`); with it are kept the settings, the parameters of each
unfinished request, and the events of the current step. From these follows what the scheduler must
do next. These rules are the engine's own, written a second time so that each checks the other.

Ended requests are forgotten, so memory does not grow with the trace.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from nvtrace import events as ev
from nvtrace.replay import SequenceState, State, phase_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nvtrace.envelope import Header

PHASES: tuple[ev.Phase, ...] = ("prefill", "decode", "mixed")
POLICIES = ("prefill_first", "mixed", "static")  # whose decisions can be checked
_TAKES = (ev.BlocksAllocate, ev.BlocksAppend)
_BLOCK_EVENTS = (*_TAKES, ev.BlocksShare, ev.BlocksRevive, ev.BlocksRelease)


@dataclass(slots=True)
class StepNotes:
    """The events of one step so far.

    Attributes:
        index: the engine_step.
        first: its first event.
        before_ns: the time of the event before that.
        early: its events before the schedule.
        admitted, preempted: requests, in order.
        stop: its ADMISSION_STOP.
        schedule, prepare, run, sample, end: its main events.
        num_computed: seq_id -> tokens computed before this step, for the batch.
        num_scheduled: seq_id -> tokens of this step, for the batch.
        sampled: requests of the batch for which a token must be sampled.
        finished: requests that ended, in order.
        has_block_changes: did any block table change?
    """

    index: int
    first: ev.Event
    before_ns: int = 0
    early: list[ev.Event] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    stop: ev.AdmissionStop | None = None
    schedule: ev.Schedule | None = None
    prepare: ev.Layout | None = None
    run: ev.Run | None = None
    sample: ev.SampleTokens | None = None
    end: ev.StepEnd | None = None
    num_computed: dict[int, int] = field(default_factory=dict)
    num_scheduled: dict[int, int] = field(default_factory=dict)
    sampled: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    has_block_changes: bool = False

    @property
    def phase(self) -> ev.Phase:
        """The phase of the step's batch, once it is scheduled."""
        return "decode" if self.schedule is None else phase_of(self.schedule)


@dataclass(slots=True)
class CallCounts:
    """Counts of the whole trace, or since the last GENERATE_START (whose prompts come first).

    `last_prompt` is the seq_id of the last of these prompts.
    """

    num_prompts: int = 0
    last_prompt: int = -1
    steps: dict[ev.Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    num_enqueued: int = 0
    num_refused: int = 0
    num_refused_prompts: int = 0
    num_outputs: int = 0


class Ledger:
    """All that is known of an engine before an event.

    It groups events into steps itself (not `replay.StepFold`): the rules must see an event before
    the fold rejects it, and a check goes on after an event that the fold has rejected.

    Attributes:
        state: the fold.
        header, init, budget, warmup, ready: the records of the start; None before.
        graphs: batch sizes that have a CUDA graph; None if not recorded.
        skip: why there are none; None if not recorded.
        started: names of the events of the start, in order.
        start_ns: time of the parts of the start so far.
        has_failed: did an exception leave the engine?
        last: the event before; None at the beginning.
        last_id: its event_id, or that of an unknown event.
        step: the current step; None between steps.
        step_before: the last step that ended; None after a reset.
        last_step: number of the last step that began.
        is_reset: has the engine been reset since that step began?
        requests: the REQUEST_ENQUEUE of each unfinished request.
        next_seq_id: the smallest seq_id that the next request can have.
        outputs_due: requests that ended and have no REQUEST_OUTPUT yet.
        evicted: blocks just evicted, to be allocated next, with their hashes.
        released: (seq_id, tokens computed, blocks freed) of the last BLOCKS_RELEASE.
        total, call: counts of the whole trace, and of the current generate(), if there is one.
    """

    def __init__(self) -> None:
        self.state = State()
        self.header: Header | None = None
        self.init: ev.EngineInit | None = None
        self.budget: ev.KvBudgetEstimate | None = None
        self.warmup: ev.WarmupModel | None = None
        self.ready: ev.EngineReady | None = None
        self.graphs: list[int] | None = None
        self.skip: ev.CudagraphSkip | None = None
        self.started: list[str] = []
        self.start_ns = 0
        self.has_failed = False
        self.last: ev.Event | None = None
        self.last_id = 0
        self.step: StepNotes | None = None
        self.step_before: StepNotes | None = None
        self.last_step = 0
        self.is_reset = False
        self.requests: dict[int, ev.RequestEnqueue] = {}
        self.next_seq_id = 0
        self.outputs_due: list[int] = []
        self.evicted: dict[int, str] = {}
        self.released = (-1, 0, 0)
        self.total = CallCounts()
        self.call: CallCounts | None = None
        self._chains: dict[int, list[str]] = {}

    # -- what follows ----------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Is this the trace of a rank that schedules? The ranks that rank 0 started do not.

        (Ranks above 0 that torchrun started do: they record an ENGINE_READY.)
        """
        is_first = self.header is None or self.header.rank == 0
        return self.init is not None and (is_first or self.ready is not None)

    def seq(self, seq_id: int) -> SequenceState:
        """An unfinished request's state."""
        return self.state.sequences[seq_id]

    def blocks_for(self, num_tokens: int) -> int:
        """The number of blocks for so many tokens."""
        return -(-num_tokens // max(self.state.block_size, 1))

    def slot(self, seq_id: int, position: int) -> int:
        """The slot of the K and V of a position."""
        index, offset = divmod(position, self.state.block_size)
        return self.seq(seq_id).block_table[index] * self.state.block_size + offset

    def chain_hash(self, seq_id: int, index: int) -> str:
        """The chain hash of a request's full block `index`; it is kept."""
        chain = self._chains.setdefault(seq_id, [])
        size, tokens = self.state.block_size, self.seq(seq_id).token_ids
        while len(chain) <= index:
            start = len(chain) * size
            parent = bytes.fromhex(chain[-1]) if chain else b""
            block = array("I", tokens[start : start + size]).tobytes()
            chain.append(hashlib.blake2b(parent + block, digest_size=16).hexdigest())
        return chain[index]

    def cached_prefix(self, seq_id: int) -> list[int]:
        """The cached blocks that a request finds at its admission; never with its last token."""
        blocks: list[int] = []
        if self.init is None or not self.init.enable_prefix_caching:
            return blocks
        for index in range((len(self.seq(seq_id).token_ids) - 1) // self.state.block_size):
            block = self.state.cached_blocks.get(self.chain_hash(seq_id, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def is_prefilling(self, seq_id: int) -> bool:
        """Has a running request not yet computed all tokens that it had at its admission?"""
        seq = self.seq(seq_id)
        return seq.num_computed_tokens < seq.num_prefill_tokens

    def needs_block(self, seq_id: int) -> bool:
        """Does the newest token of a request need a new block?"""
        seq = self.seq(seq_id)
        return len(seq.token_ids) > len(seq.block_table) * self.state.block_size

    def batch(self, running: Iterable[int], policy: str) -> dict[int, int]:
        """The batch by the policy's rules: seq_id -> number of tokens, in order.

        Args:
            running: the running queue.
            policy: "mixed" takes decodes and prompts; "prefill" and "decode" only those; any other
                takes prompts if there are any, else decodes.
        """
        by_kind: dict[bool, list[int]] = {False: [], True: []}
        for seq_id in running:
            by_kind[self.is_prefilling(seq_id)].append(seq_id)
        decoding, prefilling = by_kind[False], by_kind[True]
        if policy == "decode":
            prefilling = []
        elif policy == "prefill" or (policy != "mixed" and prefilling):
            decoding = []
        left = self.init.max_num_batched_tokens if self.init else 0
        batch: dict[int, int] = {}
        for seq_id in (*decoding, *prefilling):
            seq = self.seq(seq_id)
            num_tokens = min(len(seq.token_ids) - seq.num_computed_tokens, left)
            if num_tokens > 0:
                batch[seq_id] = num_tokens
                left -= num_tokens
        return batch

    # -- what is kept ----------------------------------------------------------------------------

    def take(self, event: ev.AnyEvent) -> None:
        """Take in one event.

        Raises:
            InconsistentTraceError: it cannot follow from those before. It is noted all the same.
        """
        self._open_step(event)
        note = self._notes.get(type(event))
        if note is not None:
            note(self, event)
        if isinstance(event, _BLOCK_EVENTS) and self.step is not None:
            self.step.has_block_changes = True
        self.last, self.last_id = event, event.event_id
        self.state.apply(event)

    def settle(self, event: ev.Event) -> None:
        """Forget what ended with `event`, after all rules were applied."""
        match event:
            case ev.StepEnd():
                self.step_before, self.step = self.step, None
            case ev.EngineReset():
                self.step = self.step_before = None
                self.is_reset = True
                self.outputs_due, self.evicted = [], {}
                self.next_seq_id = max(self.next_seq_id, *(s + 1 for s in (*event.seq_ids, -1)))
                for seq_id in event.seq_ids:
                    self._forget(seq_id)
            case ev.RequestOutput():
                self._forget(event.seq_id)
            case _ if self.step is not None and self.step.schedule is None:
                self.step.early.append(event)

    def _forget(self, seq_id: int) -> None:
        for kept in (self.state.sequences, self.requests, self._chains):
            kept.pop(seq_id, None)

    def _open_step(self, event: ev.Event) -> None:
        is_failure = isinstance(event, ev.EngineError | ev.EngineReset)
        if event.step is None or is_failure or event.step == self.last_step or not self.is_whole:
            return
        self.step = StepNotes(event.step, event, self.last.ts_ns if self.last else 0)
        self.last_step, self.is_reset = event.step, False

    def _schedule(self, event: ev.Schedule) -> None:
        if self.step is None:
            return
        if isinstance(event, ev.ScheduleDecode):
            shares = dict.fromkeys(event.seq_ids, 1)
        else:
            shares = dict(zip(event.seq_ids, event.num_scheduled_tokens, strict=False))
        step, self.step.schedule = self.step, event
        expected = {s: self.state.sequences[s] for s in shares if s in self.state.sequences}
        # At most what is left to compute: a broken trace may have a number of any size.
        left = {s: len(seq.token_ids) - seq.num_computed_tokens for s, seq in expected.items()}
        step.num_scheduled = {s: max(min(shares[s], left[s]), 0) for s in expected}
        step.num_computed = {s: seq.num_computed_tokens for s, seq in expected.items()}
        step.sampled = [s for s in expected if shares[s] == left[s]]
        for tally in self._tallies():
            tally.steps[step.phase] += 1

    def _tallies(self) -> list[CallCounts]:
        return [self.total] if self.call is None else [self.total, self.call]

    def _request_enqueue(self, event: ev.RequestEnqueue) -> None:
        self.requests[event.seq_id] = event
        self.next_seq_id = event.seq_id + 1
        for tally in self._tallies():
            if tally.num_enqueued + tally.num_refused < tally.num_prompts:
                tally.last_prompt = event.seq_id
            tally.num_enqueued += 1

    def _engine_error(self, _event: ev.EngineError) -> None:
        self.has_failed = True

    def _request_refused(self, _event: ev.RequestRefused) -> None:
        for tally in self._tallies():
            is_prompt = tally.num_enqueued + tally.num_refused < tally.num_prompts
            tally.num_refused_prompts += is_prompt
            tally.num_refused += 1

    def _request_output(self, event: ev.RequestOutput) -> None:
        if event.seq_id in self.outputs_due:
            self.outputs_due.remove(event.seq_id)
        for tally in self._tallies():
            tally.num_outputs += 1

    def _generate(self, event: ev.GenerateStart | ev.GenerateFinish) -> None:
        self.call = None
        if isinstance(event, ev.GenerateStart):
            self.call = CallCounts(num_prompts=event.n_prompts)

    def _state_transition(self, event: ev.StateTransition) -> None:
        if event.status == "FINISHED":
            self.outputs_due.append(event.seq_id)
        if self.step is None:
            return
        match event.status:
            case "RUNNING":
                self.step.admitted.append(event.seq_id)
            case "WAITING":
                self.step.preempted.append(event.seq_id)
            case "FINISHED":
                self.step.finished.append(event.seq_id)

    def _blocks_evict(self, event: ev.BlocksEvict) -> None:
        if event.reason == "page_needed":
            self.evicted.update(zip(event.block_ids, event.hashes, strict=False))

    def _blocks_take(self, _event: ev.BlocksAllocate | ev.BlocksAppend) -> None:
        self.evicted = {}

    def _blocks_release(self, event: ev.BlocksRelease) -> None:
        seq = self.state.sequences.get(event.seq_ids[-1]) if event.seq_ids else None
        if seq is not None:
            num_freed = len(event.freed[-1]) if event.freed else 0
            self.released = (seq.seq_id, seq.num_computed_tokens, num_freed)

    def _of_start(self, event: ev.Event) -> None:
        self.started.append(ev.tag_of(event))
        self.start_ns += getattr(event, "duration_ns", 0)
        match event:
            case ev.EngineInit():
                self.init = event
            case ev.KvBudgetEstimate():
                self.budget = event
            case ev.WarmupModel():
                self.warmup = event
            case ev.CudagraphCapture():
                self.graphs = event.batch_sizes
            case ev.CudagraphSkip():
                self.skip = event
            case ev.EngineReady():
                self.ready = event

    def _of_step(self, event: ev.Event) -> None:
        if self.step is None:
            return
        match event:
            case ev.AdmissionStop():
                self.step.stop = event
            case ev.PreparePrefillTensors() | ev.PrepareDecodeTensors():
                self.step.prepare = event
            case ev.RunEager() | ev.CudagraphReplay():
                self.step.run = event
            case ev.SampleTokens():
                self.step.sample = event
            case ev.StepEnd():
                self.step.end = event

    _notes: ClassVar[dict[type, Callable[[Ledger, Any], None]]] = {
        **dict.fromkeys(
            (
                *(ev.EngineInit, ev.TpRuntimeInit, ev.ModelWeightsLoaded, ev.WarmupModel),
                *(ev.KvBudgetEstimate, ev.CudagraphCapture, ev.CudagraphSkip, ev.EngineReady),
            ),
            _of_start,
        ),
        **dict.fromkeys(
            (
                *(ev.AdmissionStop, ev.PreparePrefillTensors, ev.PrepareDecodeTensors),
                *(ev.RunEager, ev.CudagraphReplay, ev.SampleTokens, ev.StepEnd),
            ),
            _of_step,
        ),
        **dict.fromkeys(ev.SCHEDULES, _schedule),
        ev.GenerateStart: _generate,
        ev.GenerateFinish: _generate,
        ev.RequestEnqueue: _request_enqueue,
        ev.RequestRefused: _request_refused,
        ev.EngineError: _engine_error,
        ev.RequestOutput: _request_output,
        ev.StateTransition: _state_transition,
        ev.BlocksEvict: _blocks_evict,
        ev.BlocksAllocate: _blocks_take,
        ev.BlocksAppend: _blocks_take,
        ev.BlocksRelease: _blocks_release,
    }
