"""Replay: the fold that rebuilds an engine's state from its trace.

    state(n + 1) = apply(state(n), event n)

What each event does to queues, blocks and tokens is written here and nowhere else in nvtrace. Tests
compare the state with the engine's after every schedule() and every postprocess(). Needs no engine
and no torch.

One rule is the block manager's as well: a freed block goes to the head of the free list if it is
empty, and to the tail if it is hashed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from nvtrace import events as ev
from nvtrace.html import html_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nvtrace.envelope import Record
    from nvtrace.steptime import Phase

_STATUSES = {*ev.codes_of(ev.Status)}
_ENDS = (ev.StateTransition, ev.EngineReset)
_PHASES: dict[type[ev.Schedule], Phase] = {
    ev.SchedulePrefill: "prefill",
    ev.ScheduleDecode: "decode",
    ev.ScheduleMixed: "mixed",
}


class InconsistentTraceError(ValueError):
    """An event cannot follow from those before it."""


@dataclass(slots=True)
class SequenceState:
    """One request, as its events record it."""

    seq_id: int
    prompt_len: int
    max_tokens: int
    token_ids: list[int]
    status: ev.Status = "WAITING"
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefill_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_len


class State:
    """An engine's state, rebuilt.

    Attributes:
        waiting, running: the queues, as seq_ids in their order.
        sequences: every request seen so far, ended ones included.
        block_size, num_blocks: of the block pool.
        ref_counts: for each block, the tables that hold it.
        free_blocks: the free blocks, next taken first.
        block_hashes: the hashed blocks and their hashes.
        cached_blocks: for each hash, its block.
        engine_step: the last step that was scheduled.
    """

    def __init__(self) -> None:
        self.block_size = 0
        self.num_blocks = 0
        self.engine_step = 0
        self.sequences: dict[int, SequenceState] = {}
        self._scheduled: dict[int, int] = {}  # tokens each sequence computes in this step
        self._clear_pool()

    def __repr__(self) -> str:
        return (
            f"<State in step {self.engine_step}: {len(self.running)} running, "
            f"{len(self.waiting)} waiting, {len(self.free_blocks)} of "
            f"{self.num_blocks} blocks free>"
        )

    def _repr_html_(self) -> str:
        head = ["seq_id", "status", "prompt_len", "num_completion_tokens", "num_computed_tokens"]
        head += ["num_cached_tokens", "block_table"]
        live = [self.sequences[seq_id] for seq_id in [*self.running, *self.waiting]]
        rows = [[getattr(seq, name) for name in head] for seq in live]
        return html_table(repr(self)[1:-1], head, rows)

    def _clear_pool(self) -> None:
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.ref_counts = [0] * self.num_blocks
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self.block_hashes: dict[int, str] = {}
        self.cached_blocks: dict[str, int] = {}

    def apply(self, record: Record) -> None:
        """Take in one record.

        Raises:
            InconsistentTraceError: it cannot follow from what came before.
        """
        handler = self._handlers.get(type(record))
        if handler is None:
            return
        try:
            handler(self, record)
        except (KeyError, IndexError, ValueError) as error:
            raise InconsistentTraceError(inconsistency(record, error)) from error

    # -- the engine's shape ----------------------------------------------------------------------

    def _engine_init(self, event: ev.EngineInit) -> None:
        self.block_size = event.block_size

    def _engine_ready(self, event: ev.EngineReady) -> None:
        if not 0 <= event.num_kvcache_blocks <= ev.MOST_BLOCKS:
            raise ValueError(f"no pool has {event.num_kvcache_blocks} blocks")
        self.num_blocks = event.num_kvcache_blocks
        self._clear_pool()

    def _engine_reset(self, event: ev.EngineReset) -> None:
        for seq_id, num_tokens in zip(event.seq_ids, event.num_tokens, strict=True):
            if seq_id not in self.sequences:  # the same error interrupted its arrival
                continue
            seq = self.sequences[seq_id]
            del seq.token_ids[num_tokens:]  # sampled, but not appended
            seq.num_computed_tokens = seq.num_cached_tokens = seq.num_prefill_tokens = 0
            seq.status, seq.finish_reason, seq.block_table = "FINISHED", "aborted", []
        self._scheduled = {}
        self._clear_pool()

    # -- queues ----------------------------------------------------------------------------------

    def _request_enqueue(self, event: ev.RequestEnqueue) -> None:
        before = self.sequences.get(event.seq_id)
        if before is not None and before.status != "FINISHED":
            raise ValueError(f"request {event.seq_id} is {before.status} already")
        self.sequences[event.seq_id] = SequenceState(
            event.seq_id, event.prompt_len, event.max_tokens, list(event.prompt_token_ids)
        )
        self.waiting.append(event.seq_id)

    def _state_transition(self, event: ev.StateTransition) -> None:
        seq = self.sequences[event.seq_id]
        if {seq.status, event.previous} <= _STATUSES:
            (self.waiting if event.previous == "WAITING" else self.running).remove(event.seq_id)
        else:  # the queue of an unknown status is not known
            for queue in (self.waiting, self.running):
                queue[:] = [seq_id for seq_id in queue if seq_id != event.seq_id]
        seq.status = event.status
        match event.status:
            case "RUNNING":
                self.running.append(event.seq_id)
                seq.num_prefill_tokens = len(seq.token_ids)
            case "WAITING":
                self.waiting.insert(0, event.seq_id)
                seq.num_preemptions += 1
            case "FINISHED":
                seq.finish_reason = event.reason

    # -- blocks ----------------------------------------------------------------------------------

    def _blocks_reuse(self, event: ev.BlocksShare | ev.BlocksRevive) -> None:
        for seq_id, block_ids in zip(event.seq_ids, event.block_ids, strict=True):
            seq = self.sequences[seq_id]
            for block_id in block_ids:
                if isinstance(event, ev.BlocksRevive):
                    del self.free_blocks[block_id]
                self.ref_counts[block_id] += 1
                seq.block_table.append(block_id)
                seq.num_computed_tokens += self.block_size
                seq.num_cached_tokens += self.block_size

    def _blocks_take(self, event: ev.BlocksAllocate | ev.BlocksAppend) -> None:
        for seq_id, block_ids in zip(event.seq_ids, event.block_ids, strict=True):
            for block_id in block_ids:
                del self.free_blocks[block_id]
                self.ref_counts[block_id] = 1
                self.sequences[seq_id].block_table.append(block_id)

    def _blocks_evict(self, event: ev.BlocksEvict) -> None:
        for block_id in event.block_ids:
            del self.cached_blocks[self.block_hashes.pop(block_id)]

    def _blocks_hash(self, event: ev.BlocksHash) -> None:
        for block_ids, hashes in zip(event.block_ids, event.hashes, strict=True):
            for block_id, chain_hash in zip(block_ids, hashes, strict=True):
                self.block_hashes[block_id] = chain_hash
                self.cached_blocks[chain_hash] = block_id

    def _blocks_release(self, event: ev.BlocksRelease) -> None:
        for seq_id, block_ids, freed in zip(
            event.seq_ids, event.block_ids, event.freed, strict=True
        ):
            held = self.sequences[seq_id].block_table
            if block_ids != held[::-1]:
                raise ValueError(f"request {seq_id} holds {held}, not {block_ids}")
            for block_id in block_ids:
                self.ref_counts[block_id] -= 1
            for block_id in freed:
                self.free_blocks[block_id] = None
                if block_id not in self.block_hashes:
                    self.free_blocks.move_to_end(block_id, last=False)
            seq = self.sequences[seq_id]
            seq.block_table = []
            seq.num_computed_tokens = seq.num_cached_tokens = 0

    # -- a step ----------------------------------------------------------------------------------

    def _schedule_prefill(self, event: ev.SchedulePrefill | ev.ScheduleMixed) -> None:
        self.engine_step = event.engine_step
        self._scheduled = dict(zip(event.seq_ids, event.num_scheduled_tokens, strict=True))

    def _schedule_decode(self, event: ev.ScheduleDecode) -> None:
        self.engine_step = event.engine_step
        self._scheduled = dict.fromkeys(event.seq_ids, 1)

    def _model_ran(self, _event: ev.RunEager | ev.CudagraphReplay) -> None:
        for seq_id, num_tokens in self._scheduled.items():
            self.sequences[seq_id].num_computed_tokens += num_tokens
        self._scheduled = {}

    def _sample_tokens(self, event: ev.SampleTokens) -> None:
        for seq_id, token_id in zip(event.seq_ids, event.token_ids, strict=True):
            self.sequences[seq_id].token_ids.append(token_id)

    _handlers: ClassVar[dict[type, Callable[[State, Any], None]]] = {
        ev.EngineInit: _engine_init,
        ev.EngineReady: _engine_ready,
        ev.EngineReset: _engine_reset,
        ev.RequestEnqueue: _request_enqueue,
        ev.StateTransition: _state_transition,
        ev.BlocksShare: _blocks_reuse,
        ev.BlocksRevive: _blocks_reuse,
        ev.BlocksAllocate: _blocks_take,
        ev.BlocksAppend: _blocks_take,
        ev.BlocksEvict: _blocks_evict,
        ev.BlocksHash: _blocks_hash,
        ev.BlocksRelease: _blocks_release,
        ev.SchedulePrefill: _schedule_prefill,
        ev.ScheduleMixed: _schedule_prefill,
        ev.ScheduleDecode: _schedule_decode,
        ev.RunEager: _model_ran,
        ev.CudagraphReplay: _model_ran,
        ev.SampleTokens: _sample_tokens,
    }


def phase_of(schedule: ev.Schedule) -> Phase:
    """The phase of a step's batch."""
    return _PHASES[type(schedule)]


def inconsistency(record: Record | ev.Event, error: Exception) -> str:
    """What is wrong with a record that cannot follow from those before it."""
    what = f"event {record.event_id} ({ev.tag_of(record)})" if isinstance(record, ev.Event) else ""
    return f"{what} does not follow from the events before it: {type(error).__name__} {error}"


@dataclass(slots=True)
class Step:
    """One engine step and what led up to it.

    Attributes:
        index: the engine_step.
        before: events since the step before (arrivals, outputs).
        events: the step's own events.
        schedule: what was decided; None if the trace ends before.
        end: its STEP_END; None if the trace ends, or the step fails, before.
        state: the state after it. Later events change it: copy what you keep.
    """

    index: int
    before: list[ev.Event]
    state: State
    events: list[ev.Event] = field(default_factory=list)
    schedule: ev.Schedule | None = None
    end: ev.StepEnd | None = None


class StepFold:
    """The state, event by event, and the step that each event is part of.

    All grouping of events into steps is done here; only the check and the Perfetto export need
    their own, and say why. Events are kept for the current step, and since the step before.

    Args:
        state: the state to start from; a new one if None.
        forgets_ended: drop each ended request from the state when the step in which it ended, or
            before which it ended, is over. A long trace is then followed in bounded memory.

    Attributes:
        state: the engine's state.
        step: the step under way, or else the last one. Its index is 0 before the first.
        is_open: is `step` under way?
        before: events since `step`, outside of any.
    """

    def __init__(self, state: State | None = None, *, forgets_ended: bool = False) -> None:
        self.state = State() if state is None else state
        self.step = Step(0, [], self.state)
        self.is_open = False
        self.before: list[ev.Event] = []
        self._forgets_ended = forgets_ended
        self._ended: list[int] = []

    def is_end(self, event: ev.Event) -> bool:
        """Is the step under way over when `event` comes? The state is still the one after it."""
        return self.is_open and event.step != self.step.index

    def apply(self, event: ev.AnyEvent) -> None:
        """Take in the next event.

        Raises:
            InconsistentTraceError: it cannot follow from those before it.
        """
        if self.is_open and event.step != self.step.index:
            self.is_open = False
            for seq_id in self._ended:
                self.state.sequences.pop(seq_id, None)
            self._ended = []
        self.state.apply(event)
        if self._forgets_ended and isinstance(event, _ENDS):
            self._ended += [seq_id for seq_id, _ in ended_by(event)]
        if event.step is None:
            self.before.append(event)
            return
        if not self.is_open:
            if event.step <= self.step.index:
                raise InconsistentTraceError(
                    f"step {event.step} comes after step {self.step.index}"
                )
            self.step, self.is_open = Step(event.step, self.before, self.state), True
            self.before = []
        self.step.events.append(event)
        if isinstance(event, ev.SCHEDULES):
            self.step.schedule = event
        elif isinstance(event, ev.StepEnd):
            self.step.end = event


def ended_by(event: ev.Event) -> list[tuple[int, str]]:
    """(seq_id, reason) of each request that an event ends."""
    match event:
        case ev.StateTransition(status="FINISHED"):
            return [(event.seq_id, event.reason)]
        case ev.EngineReset():
            return [(seq_id, "aborted") for seq_id in event.seq_ids]
    return []


def events_of(records: Iterable[Record]) -> Iterator[ev.AnyEvent]:
    """The events among records: no header, no footer, nothing unknown."""
    return (record for record in records if isinstance(record, ev.Event))


def fold_steps(
    records: Iterable[Record], state: State | None = None, *, forgets_ended: bool = False
) -> Iterator[Step]:
    """Fold records and group them by step.

    Args:
        records: what `read_trace` yields.
        state: the state to start from; a new one if None. What comes after the last step is
            applied to it as well, and its events are in a last Step of index 0.
        forgets_ended: see `StepFold`.

    Raises:
        InconsistentTraceError: an event cannot follow from those before it.
    """
    fold = StepFold(state, forgets_ended=forgets_ended)
    for event in events_of(records):
        if fold.is_end(event):
            yield fold.step
        fold.apply(event)
    if fold.is_open:
        yield fold.step
    if fold.before:
        yield Step(0, fold.before, fold.state)
