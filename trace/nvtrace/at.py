"""At: an engine's whole state at one moment of its trace, and the search for a moment.

Each step has two moments: after its schedule, when it is decided what to compute, and at its end,
when that is computed. `moments` stops the fold at each, and works out the step's input tensors from
the block tables. `claims.py` compares them with what the trace records, `query.py` reads
conditions, and `snapshots.py` finds where a fold can begin.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal

from nvtrace import events as ev
from nvtrace.claims import Claim, claims_of, said_slots
from nvtrace.replay import InconsistentTraceError, Step, StepFold, events_of, phase_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nvtrace.envelope import Record
    from nvtrace.query import Condition
    from nvtrace.replay import SequenceState, State
    from nvtrace.steptime import Phase

Point = Literal["schedule", "end"]
BlockKind = Literal["free", "cached", "used", "published", "shared"]
"""Of a free block: is it empty, or hashed? Of one in use: is it hashed, or used by several?"""


def block_kinds(state: State) -> list[BlockKind]:
    """What each block of the pool is, by its block_id."""
    kinds: list[BlockKind] = []
    for block_id, num_refs in enumerate(state.ref_counts):
        is_hashed = block_id in state.block_hashes
        if num_refs > 1:
            kinds.append("shared")
        elif num_refs:
            kinds.append("published" if is_hashed else "used")
        else:
            kinds.append("cached" if is_hashed else "free")
    return kinds


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Tokens of one sequence that this step writes into one block.

    slot = block_id * block_size + offset, for each position: offset = position % block_size.

    Attributes:
        seq_id: the sequence.
        first_position, last_position: of the tokens in the sequence, both included.
        block_index: the block's index in the block table: position // block_size.
        block_id: the block.
        first_slot, last_slot: where K and V are written, both included.
        token_ids: the tokens.
    """

    seq_id: int
    first_position: int
    last_position: int
    block_index: int
    block_id: int
    first_slot: int
    last_slot: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What goes into a step, worked out of the state at its schedule.

    Attributes:
        runs: the flat batch, in its order.
        cu_seqlens_q: (num_seqs + 1,) cumulative number of new tokens.
        context_lens: (num_seqs,) tokens that each sequence attends to, the new ones included.
    """

    runs: tuple[SlotRun, ...]
    cu_seqlens_q: tuple[int, ...]
    context_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of the flat batch."""
        return self.cu_seqlens_q[-1]

    @property
    def lengths(self) -> list[int]:
        """(num_seqs,) number of new tokens."""
        return [end - start for start, end in pairwise(self.cu_seqlens_q)]

    @property
    def cu_seqlens_k(self) -> tuple[int, ...]:
        """(num_seqs + 1,) cumulative context lengths."""
        return tuple(accumulate(self.context_lens, initial=0))


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of a trace.

    Attributes:
        step: the engine_step.
        point: after its schedule, or at its end.
        state: the engine's state then. The next moment changes it: copy what you keep. Requests
            that ended in earlier steps are left out.
        schedule: what was decided; None if the step failed before.
        inputs: the step's inputs; None if they were not asked for, or nothing was decided.
        layout: the event that records how the batch was laid out; None if `inputs` is None, or if
            there is no such event.
        claims: the fields of the step's events so far that follow from other events.
        news: events since the moment before.
    """

    step: int
    point: Point
    state: State
    schedule: ev.Schedule | None
    inputs: Inputs | None
    layout: ev.Layout | None
    claims: list[Claim]
    news: list[ev.Event]

    @property
    def phase(self) -> Phase | None:
        """The phase of the step's batch; None if nothing was decided."""
        return None if self.schedule is None else phase_of(self.schedule)

    @property
    def requests(self) -> list[SequenceState]:
        """Running and waiting ones, in order; then ended ones, and those of an unknown status."""
        sequences = self.state.sequences
        queued = dict.fromkeys((*self.state.running, *self.state.waiting))
        others = (seq_id for seq_id in sequences if seq_id not in queued)
        return [sequences[seq_id] for seq_id in (*queued, *others)]

    def runs_as_said(self) -> Iterator[tuple[SlotRun, list[int] | None]]:
        """Each run of `inputs`, and the slots that the trace records for it, or None."""
        if self.inputs is None:
            return
        slots, place = said_slots(self.layout, self.inputs.num_tokens), 0
        for run in self.inputs.runs:
            after = place + len(run.token_ids)
            yield run, None if slots is None else slots[place:after]
            place = after


@dataclass(slots=True)
class _StepMoments:
    """The moments of a step, as its events come.

    Attributes:
        has_inputs: are its inputs worked out?
        num_shown: how many of its events were news of an earlier moment.
    """

    step: Step
    has_inputs: bool = False
    inputs: Inputs | None = None
    layout: ev.Layout | None = None
    claims: list[Claim] = field(default_factory=list)
    num_shown: int = 0

    @property
    def is_scheduled(self) -> bool:
        """Is its last event the schedule? The next event is then the layout of the batch."""
        return bool(self.step.events) and self.step.events[-1] is self.step.schedule

    def note(self, event: ev.Event) -> None:
        """Note the step's last event, unless it is a layout: see `note_layout`."""
        if self.has_inputs and isinstance(event, ev.SCHEDULES):
            self.inputs = inputs_at(self.step.state, event)
        if self.inputs is not None and not isinstance(event, ev.LAYOUTS):
            self.claims += claims_of(event, self.step.state, self.inputs)

    def note_layout(self, event: ev.Event) -> None:
        """Note the next event if it is the layout of the batch, which changes no state."""
        if self.inputs and isinstance(event, ev.LAYOUTS) and event.step == self.step.index:
            self.layout = event
            self.claims += claims_of(event, self.step.state, self.inputs)

    def moment(self, point: Point, after: Sequence[ev.Event] = ()) -> Moment:
        """The moment reached now. `after`: events that came after the step."""
        step, num_shown = self.step, self.num_shown
        self.num_shown = len(step.events)
        news = [*([] if num_shown else step.before), *step.events[num_shown:], *after]
        inputs, layout, claims = self.inputs, self.layout, self.claims
        return Moment(step.index, point, step.state, step.schedule, inputs, layout, claims, news)


def moments(
    records: Iterable[Record], state: State | None = None, *, inputs_of: int | None = None
) -> Iterator[Moment]:
    """Fold records and stop at each moment.

    Args:
        records: what `read_trace` yields, or its rest after a step.
        state: what the rest begins with; a new one if None.
        inputs_of: the step whose inputs are worked out.

    Yields:
        The moments in their order. What happens between two steps is news of the second one's
        schedule; what happens after the last step makes one more moment of its end.

    Raises:
        InconsistentTraceError: an event cannot follow from those before it.
    """
    fold = StepFold(state, forgets_ended=True)
    current = _StepMoments(Step(fold.state.engine_step, [], fold.state))  # before the first
    for event in events_of(records):
        if fold.is_open and current.is_scheduled:
            current.note_layout(event)
            yield current.moment("schedule")
        if fold.is_end(event):
            yield current.moment("end")
        fold.apply(event)
        if event.step is None:
            continue
        if fold.step is not current.step:
            current = _StepMoments(fold.step, has_inputs=event.step == inputs_of)
        current.note(event)
    if fold.is_open and current.is_scheduled:
        yield current.moment("schedule")
    if fold.is_open or (fold.before and current.step.index):
        yield current.moment("end", fold.before)


# -- a step's inputs -------------------------------------------------------------------------------


def inputs_at(state: State, schedule: ev.Schedule) -> Inputs:
    """Work out a step's inputs from the state right after its schedule.

    Raises:
        InconsistentTraceError: it schedules tokens that are in no block.
    """
    num_tokens = (
        [1] * len(schedule.seq_ids)
        if isinstance(schedule, ev.ScheduleDecode)
        else schedule.num_scheduled_tokens
    )
    runs: list[SlotRun] = []
    context_lens = []
    try:
        for seq_id, num_new in zip(schedule.seq_ids, num_tokens, strict=True):
            start = state.sequences[seq_id].num_computed_tokens
            runs += _runs(state, seq_id, start, start + num_new)
            context_lens.append(start + num_new)
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        raise InconsistentTraceError(
            f"event {schedule.event_id} schedules a request without a block: {error}"
        ) from error
    return Inputs(tuple(runs), tuple(accumulate(num_tokens, initial=0)), tuple(context_lens))


def _runs(state: State, seq_id: int, start: int, stop: int) -> Iterator[SlotRun]:
    """Positions [start, stop) of a sequence, cut where a block ends."""
    seq, block_size = state.sequences[seq_id], state.block_size
    while start < stop:
        block_index, offset = divmod(start, block_size)
        end = min((block_index + 1) * block_size, stop)
        block_id = seq.block_table[block_index]
        first_slot = block_id * block_size + offset
        yield SlotRun(
            seq_id,
            start,
            end - 1,
            block_index,
            block_id,
            first_slot,
            first_slot + end - 1 - start,
            tuple(seq.token_ids[start:end]),
        )
        start = end


# -- the search ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepPoint:
    """Where a moment is."""

    step: int
    point: Point


def matches(
    found: Iterable[Moment], condition: Condition, point: Point | None = None
) -> Iterator[StepPoint]:
    """The places among `found` where a condition holds.

    A condition on the state is asked at each moment. One that names events is asked of each event
    since the moment before, together with the state at this one.

    Args:
        found: what `moments` yields.
        condition: the condition.
        point: look at this moment of each step only, and give it as the point of each place.
    """
    for moment in found:
        is_asked = condition.is_about_events or point in {None, moment.point}
        if is_asked and condition.holds(moment.state, moment.news):
            yield StepPoint(moment.step, point or moment.point)
