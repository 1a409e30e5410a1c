"""Checker: applies every rule to every event, once, in order.

An unknown code is no fault (a policy may have its own reasons), and what it decides is not checked.
A running engine can be checked as well as a finished trace: `Checker` takes events as they come, in
bounded memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from nvtrace import events as ev
from nvtrace.check import blocks, fields, queues, ranks, startup, steps, stream
from nvtrace.check.finding import Conflict, Fact, Finding, Rule
from nvtrace.check.ledger import Ledger
from nvtrace.envelope import Footer, Header, Record, Unknown
from nvtrace.replay import InconsistentTraceError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

_OF_VALUES = (*fields.RULES, *stream.RULES)  # these need no request or block to exist
_OF_STATE = (*startup.RULES, *queues.RULES, *blocks.RULES, *steps.RULES, *ranks.RULES)
_RULES = (*_OF_VALUES, *_OF_STATE)
INVARIANTS = ("names", "follows", "exit", *dict.fromkeys(rule.invariant for rule in _RULES))
"""The names of all invariants; the catalogs explain each."""

_ALWAYS = {"event_ids", "times"}  # these apply to every event
_DECIDED_BY_CODES = (ev.KvBudgetEstimate, ev.RequestRefused, ev.BlocksEvict, ev.StateTransition)
_NOT_UNDERSTOOD = (LookupError, ValueError, ArithmeticError)


class Checker:
    """Checks the events of one engine as they come.

    Attributes:
        num_events: events so far.
        num_findings: findings so far.
    """

    def __init__(self) -> None:
        self.num_events = 0
        self.num_findings = 0
        self._ledger = Ledger()
        self._rules: dict[tuple[type, str], tuple[Rule, ...]] = {}
        self._unknown: set[str] = set()  # codes
        self._is_lost = False  # does a request have an unknown status?

    def take(self, record: Record) -> list[Finding]:
        """Take in the next record of a trace; returns its findings.

        An event has at most one finding for each invariant. A later finding may be only a
        consequence of an earlier one.

        Raises:
            InconsistentTraceError: a processor dropped events on purpose.
        """
        self._refuse_gap(record)
        found: list[Finding] = []
        match record:
            case Header():
                self._ledger.header, conflicts = fields.sound(record)
                conflicts += fields.in_range(self._ledger, record)
                found += (_finding("ranges", record, conflict) for conflict in conflicts)
                conflicts = [*startup.header(self._ledger.header)]
                found += (_finding("settings", record, conflict) for conflict in conflicts)
            case Unknown(fields={"event_id": int(event_id)}):  # an event of a newer version
                self._ledger.last_id = event_id
            case Footer():
                for invariant, judge in stream.OF_FOOTER:
                    conflicts = [*judge(self._ledger, record)]
                    found += (_finding(invariant, record, conflict) for conflict in conflicts)
            case Unknown():
                pass
            case _:
                self.num_events += 1
                found += self._check(record)
        found = [*{finding.invariant: finding for finding in reversed(found)}.values()][::-1]
        self.num_findings += len(found)
        return found

    def _refuse_gap(self, record: Record) -> None:
        header, last = self._ledger.header, self._ledger.last_id
        is_meant = header is not None and header.is_filtered
        if is_meant and getattr(record, "event_id", last) > last + 1:
            raise InconsistentTraceError(
                f"after event {last}, record(processors=...) dropped events on purpose: a check "
                "needs all of them"
            )

    def _check(self, event: ev.AnyEvent) -> Iterator[Finding]:
        ledger = self._ledger
        unknown = ev.unknown_codes(event)
        self._unknown |= {*unknown.values()}
        self._is_lost |= "status" in unknown
        asked = None
        if self._is_lost or (unknown and isinstance(event, _DECIDED_BY_CODES)):
            asked = _ALWAYS
        unnamed = list(stream.names(ledger, event)) if ledger.is_whole else []
        yield from (_finding("names", event, conflict) for conflict in unnamed)
        yield from self._ask("before", event, unknown, is_strange=bool(unnamed), only=asked)
        try:
            ledger.take(event)
        except InconsistentTraceError as error:
            yield _finding("follows", event, _not_following(event, error.__cause__ or error))
        yield from self._ask("after", event, unknown, is_strange=bool(unnamed), only=asked)
        ledger.settle(event)

    def _ask(
        self,
        moment: Literal["before", "after"],
        event: ev.Event,
        unknown: Container[str],
        *,
        is_strange: bool,
        only: Container[str] | None,
    ) -> Iterator[Finding]:
        """Apply the rules to an event.

        Args:
            moment: those before the event is applied to the state, or those after.
            event: the event.
            unknown: its fields with unknown codes.
            is_strange: does it name a request or block that does not exist? Then few rules apply.
            only: apply only these invariants; all if None.
        """
        for rule in self._rules_for(type(event), moment):
            if is_strange and rule not in _OF_VALUES:
                continue
            if only is not None and rule.invariant not in only:
                continue
            try:
                for conflict in rule.judge(self._ledger, event):
                    if conflict.recorded.name not in unknown and not self._has_unknown_code(
                        conflict
                    ):
                        yield _finding(rule.invariant, event, conflict)
            except _NOT_UNDERSTOOD as error:
                yield _finding("follows", event, _not_following(event, error))

    def _has_unknown_code(self, conflict: Conflict) -> bool:
        """Does one of the two facts hold an unknown code?"""
        return bool(self._unknown) and any(
            isinstance(value, str) and value in self._unknown
            for fact in conflict
            for value in (fact.value if isinstance(fact.value, list | tuple) else [fact.value])
        )

    def _rules_for(self, kind: type, moment: Literal["before", "after"]) -> tuple[Rule, ...]:
        key = (kind, moment)
        if key not in self._rules:
            self._rules[key] = tuple(
                rule
                for rule in _RULES
                if rule.moment == moment and (not rule.types or kind in rule.types)
            )
        return self._rules[key]


def check(records: Iterable[Record]) -> Iterator[Finding]:
    """Check a trace in one pass.

    Args:
        records: what `nvtrace.reader.read_trace` yields.

    Yields:
        The findings, in the order of their events.
    """
    checker = Checker()
    for record in records:
        yield from checker.take(record)


def _finding(invariant: str, event: ev.Event | Header | Footer, conflict: Conflict) -> Finding:
    if isinstance(event, Header):
        return Finding(invariant, None, 0, "TRACE_HEADER", *conflict)
    if isinstance(event, Footer):
        return Finding(invariant, None, event.event_id, "TRACE_FOOTER", *conflict)
    return Finding(invariant, event.step, event.event_id, ev.tag_of(event), *conflict)


def _not_following(event: ev.Event, error: BaseException) -> Conflict:
    return Conflict(
        Fact("event", ev.tag_of(event)), Fact("fold", f"{type(error).__name__}: {error}")
    )
