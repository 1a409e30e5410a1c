"""Records -> the summary of a run (`summary.py`).

    summarize(read_trace("trace.jsonl"))   the whole trace
    summarize_steps(records, run)          one step after the other

No event is kept longer than it is needed, and what many steps have in common is kept once: a long
trace is summarized in little memory.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from nvtrace import events as ev
from nvtrace.envelope import Footer, Header
from nvtrace.explain.origins import whole_need
from nvtrace.metrics import PhaseMetrics
from nvtrace.replay import InconsistentTraceError, ended_by, fold_steps, phase_of
from nvtrace.summary import BlockCounts, RequestSummary, RunSummary, Share, StepSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    from nvtrace.envelope import Record
    from nvtrace.replay import State, Step
    from nvtrace.steptime import Phase

_Value = TypeVar("_Value", bound="Hashable")
_MOST_TEXT = 1000  # characters of an answer: more than any terminal is wide
_MOST_KEPT = 10_000  # values that steps may have in common


def summarize(
    records: Iterable[Record], *, is_wanted: Callable[[int], bool] | None = None
) -> RunSummary:
    """Fold a trace into its summary, up to an event that cannot follow from those before it.

    Args:
        records: what `nvtrace.reader.read_trace` yields, the header first.
        is_wanted: which steps to keep, by their number; all if None.
    """
    iterator = iter(records)
    header = next(iterator)
    if not isinstance(header, Header):
        raise TypeError("the first record of a trace is its header")
    run = RunSummary(header)
    try:
        for step in summarize_steps(iterator, run):
            if is_wanted is None or is_wanted(step.index):
                run.steps.append(step)
    except InconsistentTraceError as error:
        run.broken = error
    return run


def summarize_steps(
    records: Iterable[Record], run: RunSummary, state: State | None = None
) -> Iterator[StepSummary]:
    """Fold records into the summaries of their steps, one at a time.

    Args:
        records: of a trace, without its header; or its rest after a step.
        run: knows the requests that have not ended, and is kept up to date; its `steps` are not.
        state: what the records begin with; a new one if None.

    Raises:
        InconsistentTraceError: an event cannot follow from those before it.
    """
    common = _Common()
    for step in fold_steps(_watch(records, run), state, forgets_ended=True):
        with _understood(run):
            if step.index:
                summary = _summarize_step(step, run, common)
                _count(summary, run)
            else:  # what came after the last step
                note_requests(step.before, run.requests, run.last_step)
        if step.index:
            yield summary


@contextmanager
def _understood(run: RunSummary) -> Iterator[None]:
    """What cannot be made sense of is the trace's fault."""
    where = f"event {run.num_events} or one shortly before it"
    try:
        yield
    except KeyError as error:
        raise InconsistentTraceError(
            f"{where} is about request {error}, which never arrived"
        ) from error
    except (ValueError, ArithmeticError) as error:
        raise InconsistentTraceError(f"{where} contradicts itself: {error}") from error


class _Common:
    """What many steps have in common, so that it is kept once."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Hashable] = {}

    def __call__(self, value: _Value) -> _Value:
        """The same value, as it is kept already if it was there before."""
        if len(self._values) >= _MOST_KEPT:
            self._values.clear()
        return self._values.setdefault(value, value)  # type: ignore[return-value]  # they are equal


def _count(step: StepSummary, run: RunSummary) -> None:
    before = run.sums.get(step.phase, PhaseMetrics())
    wall_ns = before.wall_ns + (step.wall_ns or 0)
    run.sums[step.phase] = PhaseMetrics(before.num_steps + 1, wall_ns=wall_ns)
    run.first_step = step.index if run.first_step is None else run.first_step
    run.last_step = step.index


def _watch(records: Iterable[Record], run: RunSummary) -> Iterator[Record]:
    """Pass records on, and note those that say something of the run as a whole."""
    for record in records:
        match record:
            case ev.EngineInit():
                run.init = record
            case ev.KvBudgetEstimate():
                run.budget = record
            case ev.ModelWeightsLoaded():
                run.weights = record
            case ev.EngineReady():
                run.ready = record
            case ev.RequestRefused():
                run.refused.append(record)
            case ev.EngineError():
                run.errors.append(record)
            case Footer():
                run.footer = record
        if not isinstance(record, Header | Footer):
            run.num_events += 1
        yield record


def note_requests(
    events: Iterable[ev.Event], requests: dict[int, RequestSummary], last_step: int | None
) -> None:
    """Keep the requests up to date.

    Args:
        events: what happens next.
        requests: by their numbers.
        last_step: the last step before `events`; None before the first.

    Raises:
        KeyError: an event is about a request that never arrived.
    """
    for event in events:
        match event:
            case ev.RequestEnqueue():
                requests[event.seq_id] = RequestSummary(
                    event.seq_id, event.prompt_len, event.max_tokens, event.ts_ns
                )
            case ev.SampleTokens():
                for seq_id in event.seq_ids:
                    request = requests[seq_id]
                    request.num_completion_tokens += 1
                    if request.first_token_ns is None:
                        request.first_token_step = event.step
                        request.first_token_ns = event.ts_ns
            case ev.Preempt():
                requests[event.seq_id].num_preemptions += 1
            case ev.StateTransition() | ev.EngineReset():
                for seq_id, reason in ended_by(event):
                    requests[seq_id].reason = reason
                    requests[seq_id].end_step = last_step if event.step is None else event.step
            case ev.RequestOutput():
                requests[event.seq_id].text = event.text[:_MOST_TEXT]


def _summarize_step(step: Step, run: RunSummary, common: _Common) -> StepSummary:
    note_requests((*step.before, *step.events), run.requests, run.last_step)
    transitions = [event for event in step.events if isinstance(event, ev.StateTransition)]
    admitted = tuple(event.seq_id for event in transitions if event.status == "RUNNING")
    shares = common(_shares(step, frozenset(admitted), common))
    for share in shares:
        if share.seq_id in admitted and not share.is_recompute:
            run.requests[share.seq_id].num_cached_tokens = share.num_cached
    schedule, end, state = step.schedule, step.end, step.state
    stop = next((event for event in step.events if isinstance(event, ev.AdmissionStop)), None)
    is_led = schedule is None and run.header.rank > 0
    phase, num_seqs, num_tokens = _computed(step.events) if is_led else (None, 0, 0)
    return StepSummary(
        index=step.index,
        phase=phase if schedule is None else phase_of(schedule),
        reason=None if schedule is None else schedule.reason,
        shares=shares,
        num_batched_tokens=getattr(
            schedule, "num_batched_tokens", sum(share.num_tokens for share in shares) or num_tokens
        ),
        waiting_len=len(state.waiting) if schedule is None else schedule.waiting_len,
        running_len=len(state.running) if schedule is None else schedule.running_len,
        free_blocks=len(state.free_blocks) if schedule is None else schedule.free_blocks,
        waiting=common(tuple(state.waiting)),
        running=common(tuple(state.running)),
        arrived=tuple(
            event.seq_id for event in step.before if isinstance(event, ev.RequestEnqueue)
        ),
        aborted=tuple(event.seq_id for event in step.before if isinstance(event, ev.RequestAbort)),
        admitted=admitted,
        preempted=tuple(event for event in step.events if isinstance(event, ev.Preempt)),
        finished=tuple(end for event in step.events for end in ended_by(event)),
        stop=stop,
        error=next((event for event in step.events if isinstance(event, ev.EngineError)), None),
        blocks=common(_block_counts(step.events)),
        tags=common(frozenset(ev.tag_of(event) for event in (*step.before, *step.events))),
        start_ns=step.events[0].ts_ns,
        end_ns=step.events[-1].ts_ns,
        wall_ns=None if end is None else end.wall_ns,
        is_led=is_led,
        scheduled=num_seqs if schedule is None else schedule.scheduled,
        num_blocks_held=_held_by_preempted(step.events),
        stop_whole=None if stop is None else whole_need(stop, state),
    )


def _computed(events: list[ev.Event]) -> tuple[Phase | None, int, int]:
    """What a rank says that is told what to compute: the phase, the sequences, the tokens."""
    phase: Phase | None = None
    num_seqs = num_tokens = 0
    for event in events:
        match event:
            case ev.PreparePrefillTensors():
                phase, num_seqs, num_tokens = "prefill", event.n_seqs, event.flat_tokens
            case ev.PrepareDecodeTensors():
                phase, num_seqs, num_tokens = "decode", event.batch_size, event.batch_size
            case ev.RunEager(reason="mixed"):
                phase = "mixed"
    return phase, num_seqs, num_tokens


def _held_by_preempted(events: list[ev.Event]) -> tuple[int, ...]:
    held: dict[int, int] = {}
    found = []
    for event in events:
        if isinstance(event, ev.BlocksRelease):
            held |= dict(zip(event.seq_ids, map(len, event.block_ids), strict=True))
        elif isinstance(event, ev.Preempt):
            found.append(held.get(event.seq_id, event.num_blocks_freed))
    return tuple(found)


def _shares(step: Step, admitted: frozenset[int], common: _Common) -> tuple[Share, ...]:
    schedule = step.schedule
    if isinstance(schedule, ev.ScheduleDecode):
        return tuple(common(_decode_share(seq_id)) for seq_id in schedule.seq_ids)
    if schedule is None:
        return ()
    sequences = step.state.sequences
    return tuple(
        Share(
            seq_id,
            num_computed,
            num_tokens,
            sequences[seq_id].num_prefill_tokens,
            sequences[seq_id].prompt_len,
            num_cached if seq_id in admitted else 0,
        )
        if num_computed < sequences[seq_id].num_prefill_tokens
        else common(_decode_share(seq_id))
        for seq_id, num_computed, num_tokens, num_cached in zip(
            schedule.seq_ids,
            schedule.num_computed_tokens,
            schedule.num_scheduled_tokens,
            schedule.num_cached_tokens,
            strict=True,
        )
    )


def _decode_share(seq_id: int) -> Share:
    return Share(seq_id, 0, 1, 1, 1, is_prefill=False)


def _block_counts(events: list[ev.Event]) -> BlockCounts:
    taken = reused = hashed = evicted = freed = revived = 0
    for event in events:
        match event:
            case ev.BlocksAllocate() | ev.BlocksAppend():
                taken += sum(map(len, event.block_ids))
            case ev.BlocksShare():
                reused += sum(map(len, event.block_ids))
            case ev.BlocksRevive():
                revived += sum(map(len, event.block_ids))
            case ev.BlocksHash():
                hashed += sum(map(len, event.block_ids))
            case ev.BlocksEvict():
                evicted += len(event.block_ids)
            case ev.BlocksRelease():
                freed += sum(map(len, event.freed))
    return BlockCounts(taken, reused + revived, hashed, evicted, freed, revived)
