"""Findings: two facts that conflict, and the event where they do. Rules find them.

The catalog explains each invariant and names each fact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from nvtrace.check.ledger import Ledger


class Fact(NamedTuple):
    """A value that the trace records, or that follows from earlier events.

    Attributes:
        name: a field of the event, or a code of the catalog's [check.facts].
        value: its value.
    """

    name: str
    value: object


class Conflict(NamedTuple):
    """Two facts that cannot both be true: the recorded one, and the expected one."""

    recorded: Fact
    expected: Fact


@dataclass(frozen=True, slots=True)
class Finding:
    """One invariant that does not hold, at one event.

    Attributes:
        invariant: its name; the catalog has its title and explains it.
        step: the engine_step; None outside a step.
        event_id: of the event that shows it.
        event: that event's name.
        recorded: what the event records.
        expected: what follows from the events before it.
    """

    invariant: str
    step: int | None
    event_id: int
    event: str
    recorded: Fact
    expected: Fact


Judge = Callable[["Ledger", Any], Iterator[Conflict]]


class Rule(NamedTuple):
    """Checks events of some types against the events before them.

    Attributes:
        invariant: its invariant; an invariant may have several rules.
        moment: does it see the engine's state before the event, or after it?
        types: the types of events that it checks; empty for all.
        judge: yields the conflicts.
    """

    invariant: str
    moment: Literal["before", "after"]
    types: tuple[type, ...]
    judge: Judge


def differ(field: str, recorded: object, source: str, expected: object) -> Iterator[Conflict]:
    """Yield a conflict unless both values are equal."""
    if recorded != expected:
        yield Conflict(Fact(field, recorded), Fact(source, expected))
