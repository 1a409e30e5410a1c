"""Diff: compare two traces, and find the first decision that differs.

    settings     those that differ
    inputs       requests that differ: prompts, parameters, seeds, steps of arrival and abort
    reason       the first reason that differs: of waiting, of a step's phase, of an end
    decision     the first decision with another effect, and both states there
    latencies    each request's in both traces (they do not count as a difference)
    tokens       the first that differs, for each request

A decision's effect is which requests, how many tokens and which blocks; its reason is compared
apart. Budgets and counters that only follow from the settings (`token_budget`, `free_blocks`,
`have`) are not compared, nor are inputs, times, tokens and hashes.

Both traces are read side by side, once; the requests of both are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, takewhile, zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any

from nvtrace import events as ev
from nvtrace.envelope import Header
from nvtrace.measure import Measure
from nvtrace.replay import InconsistentTraceError, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nvtrace.envelope import Record
    from nvtrace.metrics import RequestMetrics

_NO_DECISION = (
    *("event_id", "ts_ns", "step", "phase"),
    *("token_budget", "free_blocks", "have", "token_id", "hashes"),
)
_NO_EFFECT = (*_NO_DECISION, "reason", "max_tokens")
_NO_INPUT = (*_NO_DECISION, "reason", "seq_id", "waiting_len", "prompt_len")
_DECISIONS = (
    *(ev.RequestRefused, ev.EngineReset),
    *(*ev.SCHEDULES, ev.Preempt),
    *(ev.StateTransition, ev.BlocksShare, ev.BlocksRevive, ev.BlocksAllocate, ev.BlocksAppend),
    *(ev.BlocksHash, ev.BlocksEvict, ev.BlocksRelease),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that differs; None where one of the traces does not record it."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Input:
    """An input that differs in requests that both traces have.

    Attributes:
        name: a field of REQUEST_ENQUEUE; or "arrival" or "abort", the step after which the request
            arrived or was aborted.
        seq_ids: the requests.
        a, b: the values of the first of them.
    """

    name: str
    seq_ids: tuple[int, ...]
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class ShortState:
    """A summary of an engine's state.

    Attributes:
        waiting, running: the queues.
        num_free_blocks: free KV blocks.
        num_cached_blocks: hashed blocks, free or not.
    """

    waiting: tuple[int, ...]
    running: tuple[int, ...]
    num_free_blocks: int
    num_cached_blocks: int

    @classmethod
    def of(cls, state: State) -> ShortState:
        """The summary of `state` as it is now."""
        num_cached = len(state.cached_blocks)
        return cls((*state.waiting,), (*state.running,), len(state.free_blocks), num_cached)


@dataclass(frozen=True, slots=True)
class Side:
    """One trace at the first decision that differs.

    Attributes:
        step: the engine step; None between two steps, or at the trace's end.
        event: the decision's event; None at the trace's end.
        value: the field's value.
        facts: the fields of the event that are compared.
        state: after the decision.
    """

    step: int | None
    event: str | None
    value: Any
    facts: dict[str, Any]
    state: ShortState


@dataclass(frozen=True, slots=True)
class Decision:
    """The first decision that differs in its effect, or in its reason.

    Attributes:
        number: number of decisions before it, which are the same.
        after_step: the last step before it.
        field: the first field that differs; "step", or "event" for another kind of event.
    """

    number: int
    after_step: int
    field: str
    a: Side
    b: Side


@dataclass(frozen=True, slots=True)
class Latency:
    """A request that ended in both traces."""

    seq_id: int
    a: RequestMetrics
    b: RequestMetrics

    @property
    def ttft_ratio(self) -> float | None:
        """B's time to first token / A's."""
        return _ratio(self.a.time_to_first_token_ns, self.b.time_to_first_token_ns)

    @property
    def e2e_ratio(self) -> float | None:
        """B's end-to-end latency / A's."""
        return _ratio(self.a.e2e_request_latency_ns, self.b.e2e_request_latency_ns)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A request whose tokens differ.

    Attributes:
        seq_id: the request.
        index: number of generated tokens before, which are the same.
        a, b: the token there; None if the request has no more tokens.
        num_a, num_b: tokens generated.
    """

    seq_id: int
    index: int
    a: int | None
    b: int | None
    num_a: int
    num_b: int


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """All differences of two traces.

    Attributes:
        settings: those that differ.
        inputs: those that differ.
        reason: the first that differs, up to `decision`; None if all are the same.
        decision: the first with another effect; None if all have the same.
        num_decisions: how many were compared: all, or those before `decision`.
        latencies: of the requests that ended in both; empty if `num_untimed` is not 0.
        num_untimed: steps of simulated traces whose time is unknown.
        only_a, only_b: requests that only one of them has.
        tokens: of the requests in both, those whose tokens differ.
        num_same_tokens: number of requests in both with the same tokens.
    """

    settings: list[Setting]
    inputs: list[Input]
    reason: Decision | None
    decision: Decision | None
    num_decisions: int
    latencies: list[Latency]
    num_untimed: int
    only_a: list[int]
    only_b: list[int]
    tokens: list[Tokens]
    num_same_tokens: int

    @property
    def is_same(self) -> bool:
        """Are all decisions the same, and their reasons?"""
        return self.decision is None and self.reason is None

    @property
    def ttft_ratio(self) -> float | None:
        """The median over `latencies`."""
        return _median(latency.ttft_ratio for latency in self.latencies)

    @property
    def e2e_ratio(self) -> float | None:
        """The median over `latencies`."""
        return _median(latency.e2e_ratio for latency in self.latencies)


def diff(a: Iterable[Record], b: Iterable[Record]) -> TraceDiff:
    """Compare two traces.

    Args:
        a: what `read_trace` yields of one trace.
        b: of the other.

    Raises:
        InconsistentTraceError: an event cannot follow from those before it, in the trace that the
            message names.
    """
    left, right = _Trace("A", a), _Trace("B", b)
    decision: Decision | None = None
    reason: Decision | None = None
    number = last_step = 0
    nothing: tuple[None, list[ev.Event]] = (None, [])
    streams = left.decisions(), right.decisions()
    for (mine, my_reasons), (theirs, their_reasons) in zip_longest(*streams, fillvalue=nothing):
        name, whys = _first_difference(mine, theirs), (my_reasons, their_reasons)
        if name is not None:
            sides = left.side(mine, name), right.side(theirs, name)
            decision = Decision(number, last_step, name, *sides)
            # The reason may come later in the step.
            later = _reasons_of_step(mine, streams[0]), _reasons_of_step(theirs, streams[1])
            whys = [*my_reasons, *later[0]], [*their_reasons, *later[1]]
        for why, their_why in () if reason else zip_longest(*whys):
            what = _first_difference(why, their_why, ("seq_id", "reason", "need"))
            if what is not None:
                sides = left.side(why, what), right.side(their_why, what)
                reason = Decision(number, last_step, what, *sides)
                break
        if decision is not None:
            break
        number += 1
        last_step = (mine.step if mine else None) or last_step
    for trace in (left, right):
        trace.read_the_rest()
    both = sorted(left.state.sequences.keys() & right.state.sequences.keys())
    num_untimed = left.num_untimed + right.num_untimed
    tokens = [found for seq_id in both if (found := _tokens(seq_id, left.state, right.state))]
    return TraceDiff(
        settings=_settings(left.settings, right.settings),
        inputs=_inputs(both, left.asked, right.asked),
        reason=reason,
        decision=decision,
        num_decisions=number,
        latencies=[
            Latency(seq_id, left.ended[seq_id], right.ended[seq_id])
            for seq_id in both
            if seq_id in left.ended and seq_id in right.ended and not num_untimed
        ],
        num_untimed=num_untimed,
        only_a=sorted(left.state.sequences.keys() - right.state.sequences.keys()),
        only_b=sorted(right.state.sequences.keys() - left.state.sequences.keys()),
        tokens=tokens,
        num_same_tokens=len(both) - len(tokens),
    )


@dataclass(slots=True)
class _Trace:
    """One of the two traces, while it is read."""

    name: str
    records: Iterable[Record]
    state: State = field(default_factory=State)
    measure: Measure = field(default_factory=Measure)
    ended: dict[int, RequestMetrics] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    asked: dict[int, dict[str, Any]] = field(default_factory=dict)
    num_untimed: int = 0

    def __post_init__(self) -> None:
        self.records = iter(self.records)

    def decisions(self) -> Iterator[tuple[ev.Event, list[ev.Event]]]:
        """Each decision, after it was folded, and the events that give its reasons."""
        reasons: list[ev.Event] = []
        for record in self.records:
            self._take(record)
            if isinstance(record, ev.AdmissionStop):
                reasons.append(record)
            elif isinstance(record, _DECISIONS):
                yield record, [*reasons, record] if hasattr(record, "reason") else reasons
                reasons = []

    def read_the_rest(self) -> None:
        """Read the rest of the trace."""
        for record in self.records:
            self._take(record)

    def side(self, decision: ev.Event | None, name: str) -> Side:
        """This trace, at a decision that differs in `name`."""
        state = ShortState.of(self.state)
        if decision is None:
            return Side(None, None, None, {}, state)
        tag = ev.tag_of(decision)
        value = tag if name == "event" else getattr(decision, name)
        return Side(decision.step, tag, value, _facts(decision), state)

    def _take(self, record: Record) -> None:
        try:
            self.state.apply(record)
            for request in self.measure.apply(record):
                self.ended[request.seq_id] = request
        except InconsistentTraceError as error:
            raise InconsistentTraceError(f"trace {self.name}: {error}") from error
        match record:
            case Header():
                self.settings |= _of_header(record)
                self.num_untimed = record.facts.clock.num_untimed_steps or 0
            case ev.EngineInit():
                self.settings |= _facts(record)
            case ev.RequestEnqueue():
                facts = _facts(record, _NO_INPUT)
                self.asked[record.seq_id] = facts | {"arrival": self.state.engine_step}
            case ev.RequestAbort() if record.seq_id in self.asked:
                self.asked[record.seq_id]["abort"] = self.state.engine_step
            case ev.EngineReady():
                self.settings["num_kvcache_blocks"] = record.num_kvcache_blocks
                self.settings["eos_token_ids"] = record.eos_token_ids


def _of_header(header: Header) -> dict[str, Any]:
    """The settings in a header; those of ENGINE_INIT have the names that it gives them."""
    config = header.config | {"block_size": header.config.get("kvcache_block_size")}
    config |= {"tp_size": header.config.get("tensor_parallel_size")}
    twice = {"kvcache_block_size", "tensor_parallel_size"}
    known = {name: value for name, value in config.items() if name not in twice}
    return {
        **{name: value for name, value in known.items() if value is not None},
        "mode": header.mode,
        "engine_version": header.engine.get("version"),
        **{f"environment.{name}": value for name, value in header.environment.items()},
        **{f"model.{name}": value for name, value in header.model.items()},
    }


def _facts(event: ev.Event, left_out: tuple[str, ...] = _NO_DECISION) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__ if name not in left_out}


def _inputs(
    seq_ids: list[int], a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]]
) -> list[Input]:
    """The inputs that differ, field by field."""
    unlike: dict[str, list[int]] = {}
    for seq_id in seq_ids:
        for name in {**a[seq_id], **b[seq_id]}:
            if a[seq_id].get(name) != b[seq_id].get(name):
                unlike.setdefault(name, []).append(seq_id)
    return [
        Input(name, tuple(found), a[found[0]].get(name), b[found[0]].get(name))
        for name, found in unlike.items()
    ]


def _settings(a: dict[str, Any], b: dict[str, Any]) -> list[Setting]:
    names = [*a, *(name for name in b if name not in a)]
    return [Setting(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)]


def _first_difference(
    a: ev.Event | None, b: ev.Event | None, names: tuple[str, ...] | None = None
) -> str | None:
    """The name of the first field in which two decisions differ; None if they are the same.

    Args:
        a: one decision; None for none.
        b: the other.
        names: the fields to compare; those of a decision's effect if None.
    """
    if a is None or b is None or type(a) is not type(b):
        return "event"
    if a.step != b.step:
        return "step"
    for name in a.__struct_fields__:
        is_asked = name not in _NO_EFFECT if names is None else name in names
        if is_asked and getattr(a, name) != getattr(b, name):
            return name
    return None


def _reasons_of_step(
    event: ev.Event | None, decisions: Iterator[tuple[ev.Event, list[ev.Event]]]
) -> Iterator[ev.Event]:
    """The events with reasons in the rest of an event's step."""
    if event is not None:
        rest = takewhile(lambda pair: pair[0].step == event.step, decisions)
        yield from chain.from_iterable(reasons for _, reasons in rest)


def _tokens(seq_id: int, a: State, b: State) -> Tokens | None:
    mine, theirs = (_completion(state, seq_id) for state in (a, b))
    if mine == theirs:
        return None
    pairs = zip(mine, theirs, strict=False)
    index = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(mine), len(theirs)))
    return Tokens(
        seq_id=seq_id,
        index=index,
        a=mine[index] if index < len(mine) else None,
        b=theirs[index] if index < len(theirs) else None,
        num_a=len(mine),
        num_b=len(theirs),
    )


def _completion(state: State, seq_id: int) -> list[int]:
    seq = state.sequences[seq_id]
    return seq.token_ids[seq.prompt_len :]


def _ratio(a: int | None, b: int | None) -> float | None:
    return b / a if a and b is not None else None


def _median(ratios: Iterable[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return median(known) if known else None
