"""Life: the links of one request, step by step.

    RequestStep         the events of a step that are about the request
    ChainBuilder   RequestStep -> links, and the little that one step must know of those before

`request.py` reads the trace, and `folding.py` joins links that are alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvtrace import events as ev
from nvtrace.explain import links
from nvtrace.explain.origins import (
    BlockOrigins,
    Sources,
    given_back,
    idle_reason,
    rows_of,
    whole_need,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvtrace.replay import SequenceState


@dataclass(slots=True)
class RequestStep:
    """The events of one step about the request.

    Attributes:
        seq_id, step: the request and the step.
        end_ns: the time of the step's last event so far.
        place: number of requests before it in the waiting queue at the ADMISSION_STOP.
        whole: what the queue's head would need without the prefix cache.
        released: its entry in `BlockOrigins.released` when it was preempted.
        ending: the event that ended it; the reset, if an error came after its own end.
    """

    seq_id: int
    step: int
    end_ns: int = 0
    schedule: ev.Schedule | None = None
    stop: ev.AdmissionStop | None = None
    place: int = 0
    whole: int | None = None
    preempt: ev.Preempt | None = None
    released: tuple[int, tuple[int, ...]] | None = None
    admission: ev.StateTransition | None = None
    sources: Sources = field(default_factory=Sources)
    ending: ev.StateTransition | ev.EngineReset | None = None
    error: ev.EngineError | None = None

    @property
    def is_broken(self) -> bool:
        """Did the step fail, before or after its schedule?"""
        was_reset = isinstance(self.ending, ev.EngineReset)
        return self.schedule is None or self.error is not None or was_reset

    def note(self, event: ev.AnyEvent, fold: BlockOrigins) -> None:
        """Take in an event of the step, after `fold` has applied it."""
        self.end_ns = event.ts_ns
        match event:
            case ev.AdmissionStop() if self.seq_id in fold.state.waiting:
                self.stop, self.place = event, fold.state.waiting.index(self.seq_id)
                self.whole = whole_need(event, fold.state)
            case ev.Preempt() if event.seq_id == self.seq_id:
                self.preempt = event
                self.released = fold.released.get(self.seq_id)
            case ev.SchedulePrefill() | ev.ScheduleDecode() | ev.ScheduleMixed():
                self.schedule = event
            case ev.StateTransition() if event.seq_id == self.seq_id:
                if event.status == "RUNNING":
                    self.admission = event
                elif event.status == "FINISHED":
                    self.ending = event
            case ev.EngineReset() if self.seq_id in event.seq_ids:
                self.ending = event
            case ev.EngineError():
                self.error = event


class ChainBuilder:
    """Builds a request's chain of links, step by step.

    Args:
        arrival: the request's REQUEST_ENQUEUE.
        step: the step before; 0 if there was none.
    """

    def __init__(self, arrival: ev.RequestEnqueue, step: int) -> None:
        self._mark_ns = arrival.ts_ns  # a link accounts for its time up to here
        self._num_computed = 0
        self._num_ever_computed = 0  # the most of its tokens that were computed at any time
        self._num_to_prefill = 0
        self._is_preempted = False
        self.queued = links.Queued(
            first_step=step,
            last_step=step,
            event_ids=(arrival.event_id,),
            prompt_len=arrival.prompt_len,
            max_tokens=arrival.max_tokens,
            num_ahead=arrival.waiting_len - 1,
        )

    def step(self, facts: RequestStep, fold: BlockOrigins) -> Iterator[links.AnyLife]:
        """The links of a step: its events, then the link that accounts for its time, then the end.

        Args:
            facts: the events of the step about the request.
            fold: the fold, after the step.
        """
        sequence = fold.state.sequences[facts.seq_id]
        if facts.preempt is not None:
            yield self._preempted(facts, facts.preempt)
        if facts.admission is not None:
            yield self._admitted(facts, facts.admission, sequence, fold.state.block_size)
        yield from self._activity(facts, sequence)
        if facts.ending is not None:
            yield self.ended(facts.ending, facts.step, sequence, is_between=False)

    def ended(
        self,
        event: ev.StateTransition | ev.EngineReset,
        step: int,
        sequence: SequenceState,
        *,
        is_between: bool,
    ) -> links.Ended:
        """The link of its end; between two steps it accounts for the time since the last step."""
        reason, token_id = "aborted", None
        num_tokens, max_tokens = sequence.num_completion_tokens, sequence.max_tokens
        if isinstance(event, ev.StateTransition):
            reason, token_id = event.reason, event.token_id
            num_tokens, max_tokens = event.num_completion_tokens, event.max_tokens
        return links.Ended(
            first_step=step,
            last_step=step,
            time_ns=self._time_until(event.ts_ns) if is_between else 0,
            event_ids=(event.event_id,),
            reason=reason,
            num_completion_tokens=num_tokens,
            max_tokens=max_tokens,
            token_id=token_id,
            is_between=is_between,
        )

    def unended(self, last: ev.Event, step: int, sequence: SequenceState) -> links.Unended:
        """The link for a request that has not ended when the trace ends."""
        return links.Unended(
            first_step=step,
            last_step=step,
            time_ns=self._time_until(last.ts_ns),
            event_ids=(last.event_id,),
            status=sequence.status,
            num_completion_tokens=sequence.num_completion_tokens,
            max_tokens=sequence.max_tokens,
        )

    # -- events ----------------------------------------------------------------------------------

    def _preempted(self, facts: RequestStep, event: ev.Preempt) -> links.Preempted:
        self._is_preempted, self._num_computed = True, 0
        is_all = facts.admission is None and not facts.is_broken
        place = self._span(facts, event) if is_all else _moment(facts, event)
        return links.Preempted(
            **place,
            seq_id=event.seq_id,
            for_seq_id=event.for_seq_id,
            **given_back(event, facts.released),
            num_tokens_to_recompute=event.num_tokens_to_recompute,
            is_prefilling=event.num_tokens_to_recompute < self._num_to_prefill,
        )

    def _admitted(
        self,
        facts: RequestStep,
        event: ev.StateTransition,
        sequence: SequenceState,
        block_size: int,
    ) -> links.Admitted:
        sources = facts.sources
        self._num_to_prefill = sequence.num_prefill_tokens
        return links.Admitted(
            **_moment(facts, event, sources.event_ids),
            num_tokens=sequence.num_prefill_tokens,
            num_cached_tokens=(sources.num_shared + sources.num_revived) * block_size,
            num_shared_blocks=sources.num_shared,
            shared_with=tuple(sorted(sources.shared_with)),
            num_revived_blocks=sources.num_revived,
            left_by=tuple(sorted(sources.left_by)),
            num_new_blocks=sources.num_new,
            is_again=self._is_preempted,
        )

    # -- the link that accounts for a step --------------------------------------------------------

    def _activity(self, facts: RequestStep, sequence: SequenceState) -> Iterator[links.AnyLife]:
        """What it computed, or why it did not; nothing if it was preempted, which has a link."""
        schedule = facts.schedule
        if schedule is None or facts.is_broken:
            error = None if facts.error is None else facts.error.error_type
            yield links.Broken(**self._span(facts, facts.error or facts.ending), error=error)
            return
        decode_ids, prefill_ids = rows_of(schedule)
        batch = len(schedule.seq_ids), len(schedule.seq_ids)
        if facts.seq_id in prefill_ids and not isinstance(schedule, ev.ScheduleDecode):
            yield self._prefilled(facts, schedule, batch)
        elif facts.seq_id in decode_ids:
            self._compute(self._num_computed + 1)
            yield links.Decoded(**self._span(facts, schedule), batch=batch)
        elif sequence.status not in {"WAITING", "FINISHED"}:
            is_running = sequence.status == "RUNNING"
            reason = idle_reason(schedule) if is_running else sequence.status
            yield links.Idled(**self._span(facts, schedule), reason=reason, batch=batch)
        elif facts.preempt is None:
            yield self._waited(facts)

    def _prefilled(
        self, facts: RequestStep, schedule: ev.SchedulePrefill | ev.ScheduleMixed, batch: links.Span
    ) -> links.Prefilled:
        row = schedule.seq_ids.index(facts.seq_id)
        first = schedule.num_computed_tokens[row]
        end = first + schedule.num_scheduled_tokens[row]
        num_again = max(min(end, self._num_ever_computed) - first, 0)
        self._compute(end)
        return links.Prefilled(
            **self._span(facts, schedule),
            first_token=first,
            last_token=end - 1,
            num_total=self._num_to_prefill,
            num_recomputed=num_again,
            batch=batch,
            is_complete=end >= self._num_to_prefill,
        )

    def _waited(self, facts: RequestStep) -> links.Waited:
        stop, place = facts.stop, facts.place
        return links.Waited(
            **self._span(facts, stop or facts.schedule),
            reason=None if stop is None else stop.reason,
            head_seq_id=None if stop is None else stop.seq_id,
            need=None if stop is None else (stop.need, stop.need),
            have=None if stop is None else (stop.have, stop.have),
            whole=None if facts.whole is None else (facts.whole, facts.whole),
            num_ahead=(place, place),
            is_preempted=self._is_preempted,
        )

    def _compute(self, num_computed: int) -> None:
        self._num_computed = num_computed
        self._num_ever_computed = max(self._num_ever_computed, num_computed)

    # -- steps and times of a link ----------------------------------------------------------------

    def _span(self, facts: RequestStep, proof: ev.Event | None) -> dict[str, Any]:
        """The common fields of a link that accounts for the time since the last such link."""
        num_ns = self._time_until(facts.end_ns)
        return _moment(facts, proof) | {"num_steps": 1, "time_ns": num_ns}

    def _time_until(self, now_ns: int) -> int:
        num_ns, self._mark_ns = now_ns - self._mark_ns, now_ns
        return num_ns


def _moment(
    facts: RequestStep, proof: ev.Event | None, others: list[int] | None = None
) -> dict[str, Any]:
    """The common fields of a link: its step, and the events that prove it."""
    event_ids = [*(others or []), *([] if proof is None else [proof.event_id])]
    return {"first_step": facts.step, "last_step": facts.step, "event_ids": tuple(event_ids)}
