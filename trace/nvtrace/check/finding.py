"""Findings: two facts that disagree, and where.

Knows the form of a finding and of a rule that makes findings. Does not know any rule, or words: the
catalog says what an invariant teaches and what a fact is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from nvtrace.check.ledger import Ledger


class Fact(NamedTuple):
    """Something that the trace says, or that follows from what it said before.

    Attributes:
        name: a field of the event, or a code of the catalog's [check.facts].
        value: what is said of it.
    """

    name: str
    value: object


class Conflict(NamedTuple):
    """Two facts that cannot both be true: what the event says, and what is known otherwise."""

    recorded: Fact
    expected: Fact


@dataclass(frozen=True, slots=True)
class Finding:
    """One invariant that does not hold, at one event.

    Attributes:
        invariant: its name; the catalog has its title and what it teaches.
        step: the engine_step; None outside a step.
        event_id: of the event that shows it.
        event: that event's name.
        told: what the event says.
        known: what follows from the events before it.
    """

    invariant: str
    step: int | None
    event_id: int
    event: str
    recorded: Fact
    expected: Fact


Judge = Callable[["Ledger", Any], Iterator[Conflict]]


class Rule(NamedTuple):
    """Looks at events of some types, in the light of all that came before.

    Attributes:
        invariant: what it is a part of; an invariant may need several rules.
        moment: does it see the engine's state as it was before the event, or after it?
        types: of the events that it looks at; empty for all.
        judge: yields what disagrees.
    """

    invariant: str
    moment: Literal["before", "after"]
    types: tuple[type, ...]
    judge: Judge


def differ(field: str, recorded: object, source: str, expected: object) -> Iterator[Conflict]:
    """Yield a clash unless both are equal."""
    if recorded != expected:
        yield Conflict(Fact(field, recorded), Fact(source, expected))
