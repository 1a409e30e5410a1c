r"""The chain of one request: what it did in each step, and why.

    arrival | waited waited ADMITTED prefilled | decoded idled decoded PREEMPTED waited ... | end
              \_______________ each step is accounted for exactly once ________________/

A trace is read only up to the request's end. `life.py` turns the events of a step into links;
`nvtrace.metrics` defines the times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvtrace import events as ev
from nvtrace.explain import links
from nvtrace.explain.folding import fold
from nvtrace.explain.life import ChainBuilder, RequestStep
from nvtrace.explain.origins import BlockOrigins, EventErrors, NotInTraceError
from nvtrace.measure import Measure
from nvtrace.replay import events_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nvtrace.envelope import Record
    from nvtrace.metrics import RequestMetrics


def explain_request(
    records: Iterable[Record], seq_id: int, step: int | None = None
) -> links.RequestStory:
    """Explain a request from arrival to end, or what it did in one step.

    Args:
        records: what `read_trace` yields. They are read as far as the request's end.
        seq_id: the request.
        step: only links about this step; None for all, with equal steps folded.

    Raises:
        NotInTraceError: no such request, or it was not there in that step.
        InconsistentTraceError: an event cannot follow from those before it.
    """
    life = _Life(seq_id)
    for event in events_of(records):
        life.take(event)
        if life.is_over or (step is not None and life.fold.step.index > step):
            break
    life.close()
    if life.arrival is None:
        raise NotInTraceError(life.no_such_request())
    chain = life.chain if step is None else life.links_of(step)
    return links.RequestStory(
        seq_id=seq_id,
        prompt_len=life.arrival.prompt_len,
        max_tokens=life.arrival.max_tokens,
        chain=tuple(fold(chain)),
        times=life.times() if step is None else None,
    )


class _Life:
    """Takes in a trace, and keeps what is about one request.

    Attributes:
        fold: the engine's state.
        chain: the links so far, each about one step.
        arrival: its REQUEST_ENQUEUE; None before.
        is_over: has it ended, and the step in which it did?
    """

    def __init__(self, seq_id: int) -> None:
        self.seq_id = seq_id
        self.fold = BlockOrigins()
        self.chain: list[links.AnyLife] = []
        self.arrival: ev.RequestEnqueue | None = None
        self.is_over = False
        self._builder: ChainBuilder | None = None
        self._facts: RequestStep | None = None  # of the current step
        self._last: ev.AnyEvent | None = None
        self._now_ns = 0
        self._measure = Measure()
        self._metrics: RequestMetrics | None = None
        self._known: list[int] = []  # the first and the last request there is
        self._last_refused: ev.RequestRefused | None = None
        self._num_refused = 0

    def take(self, event: ev.AnyEvent) -> None:
        """Take in one event; ignored once the request has ended.

        Raises:
            InconsistentTraceError: it cannot follow from those before it.
        """
        if self.fold.is_end(event):
            self._end_step()
        if self.is_over:
            return
        self._last, self._now_ns = event, event.ts_ns
        with EventErrors(event):
            if event.step is not None and self._builder is not None:
                self._facts = self._facts or RequestStep(self.seq_id, event.step)
                self.fold.note_sources(event, self.seq_id, self._facts.sources)
                self.fold.apply(event)
                self._facts.note(event, self.fold)
            else:
                self.fold.apply(event)
                self._note_between(event)
        for metrics in self._measure.apply(event):
            self._metrics = metrics if metrics.seq_id == self.seq_id else self._metrics

    def close(self) -> None:
        """Finish the chain at the end of the trace."""
        self._end_step()
        if self._builder is not None and self._last is not None and not self.is_over:
            sequence = self.fold.state.sequences[self.seq_id]
            unended = self._builder.unended(self._last, self.fold.step.index, sequence)
            self.chain.append(unended)

    def links_of(self, step: int) -> list[links.AnyLife]:
        """The links about one step, without those about the time after it.

        Raises:
            NotInTraceError: the request did not exist in that step.
        """
        found = [link for link in self.chain if link.first_step == step and not _is_between(link)]
        if not found:
            raise NotInTraceError(f"request {self.seq_id} did not exist in step {step}")
        return found

    def times(self) -> links.Times:
        """Its times; up to the trace's end if it has not ended."""
        metrics = self._metrics
        if metrics is None:
            (metrics,) = self._measure.apply(_end_of(self.seq_id, self._now_ns))
        return links.Times(
            queue_ns=metrics.request_queue_time_ns,
            prefill_ns=(metrics.request_prefill_time_ns or 0) - metrics.preempted_in_prefill_ns,
            decode_ns=(metrics.request_decode_time_ns or 0) - metrics.preempted_in_decode_ns,
            preempted_ns=metrics.request_preempted_time_ns,
        )

    def no_such_request(self) -> str:
        """The message that there is no such request."""
        known = " to ".join(map(str, self._known))
        text = f"no request {self.seq_id} in the trace: it has {known or 'none'}"
        last = self._last_refused
        if last is None:
            return text
        return (
            f"{text}; {self._num_refused} refused (a refused one has no number), the last by event "
            f"{last.event_id}, {last.reason}: it needs {last.need}, but there is {last.have}"
        )

    # -- inside ----------------------------------------------------------------------------------

    def _end_step(self) -> None:
        """Turn the events of the step, which is over, into links."""
        facts, self._facts = self._facts, None
        if facts is None or self._builder is None or self._last is None:
            return
        with EventErrors(self._last):
            self.chain += self._builder.step(facts, self.fold)
        self.is_over = facts.ending is not None

    def _note_between(self, event: ev.AnyEvent) -> None:
        """Take in an event between two steps, or before the arrival."""
        step = self.fold.step.index
        match event:
            case ev.RequestEnqueue() if event.seq_id == self.seq_id:
                self.arrival, self._builder = event, ChainBuilder(event, step)
                self.chain.append(self._builder.queued)
            case ev.RequestEnqueue():
                self._known = [*self._known[:1], event.seq_id]
            case ev.RequestRefused():
                self._last_refused = event
                self._num_refused += 1
            case ev.StateTransition() if event.seq_id == self.seq_id:
                self._end_between(event)
            case ev.EngineReset() if self.seq_id in event.seq_ids:
                self._end_between(event)

    def _end_between(self, event: ev.StateTransition | ev.EngineReset) -> None:
        if self._builder is not None:
            sequence = self.fold.state.sequences[self.seq_id]
            step = self.fold.step.index
            self.chain.append(self._builder.ended(event, step, sequence, is_between=True))
            self.is_over = True


def _is_between(link: links.AnyLife) -> bool:
    return isinstance(link, links.Queued) or (isinstance(link, links.Ended) and link.is_between)


def _end_of(seq_id: int, now_ns: int) -> ev.StateTransition:
    """An event for the end of a request that has none in the trace."""
    return ev.StateTransition(
        event_id=0,
        ts_ns=now_ns,
        step=None,
        phase="postprocess",
        reason="aborted",
        seq_id=seq_id,
        previous="RUNNING",
        status="FINISHED",
        token_id=None,
        num_completion_tokens=0,
        max_tokens=0,
    )
