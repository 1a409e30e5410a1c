"""Rounds: who runs when, and what the numbers of several rounds say together.

Knows the clock. Does not know who the contenders are or what they compute.

A machine has slow minutes. So the contenders take turns within a round, every other round in the
reverse order, and ratios are taken within a round: what slows both cancels out. The first round
warms caches and allocators, and is dropped.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Protocol

from nvtrace.bench.report import Difference, Ratio, Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from nvtrace.bench.workloads import Workload

TokenIds = list[list[int]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a contender made of a workload.

    Attributes:
        token_ids: the generated tokens of each request, in the requests' order.
        step_ns: how long each engine step took, seen from outside, by its number; empty where
            there are no steps to be seen.
    """

    token_ids: TokenIds
    step_ns: dict[int, int] = field(default_factory=dict)


class Contender(Protocol):
    """Somebody who can do the work.

    Attributes:
        name: what the report calls it.
        settings: what is particular to how it runs, in a few words.
    """

    name: str
    settings: str

    def ready(self, workload: Workload) -> AbstractContextManager[None]:
        """Be ready for a round of this workload, within the context; its time is not taken."""
        ...

    def run(self, workload: Workload) -> Outcome:
        """Do the work; this is timed."""
        ...


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of every contender, by name: how long, with how much CPU time, and what came out."""

    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)


def run_rounds(
    contenders: Sequence[Contender], workload: Workload, num_rounds: int, say: Callable[[str], None]
) -> list[Round]:
    """Let the contenders take turns.

    Args:
        contenders: at least one.
        workload: the same for all.
        num_rounds: how many count; one more goes before.
        say: told of each turn.

    Returns:
        The rounds, the first one (not to be counted) among them.
    """
    rounds = []
    for number in range(num_rounds + 1):
        turn = Round()
        which = f"round {number} of {num_rounds}" if number else "warming up"
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            name = contender.name
            with contender.ready(workload):
                gc.collect()  # the garbage of the one before is not this one's time
                start, cpu_start = time.perf_counter(), time.process_time()
                turn.outcomes[name] = contender.run(workload)
                turn.seconds[name] = time.perf_counter() - start
                turn.cpu_seconds[name] = time.process_time() - cpu_start
            say(f"{workload.name}, {which}: {name} {turn.seconds[name]:.2f} s")
        rounds.append(turn)
    return rounds


def spread(values: Sequence[float]) -> Spread:
    """Median, lowest, highest of at least one value."""
    return Spread(median(values), min(values), max(values))


def ratios(names: Sequence[str], rounds: Sequence[Round]) -> list[Ratio]:
    """How many times as fast the first of these contenders is as each other, round by round."""
    first, *others = names
    return [
        Ratio(
            contender=first,
            against=other,
            times=spread([turn.seconds[other] / turn.seconds[first] for turn in rounds]),
        )
        for other in others
    ]


def first_difference(names: Sequence[str], rounds: Sequence[Round]) -> Difference | None:
    """Where somebody's tokens are not those of the first of these contenders in the first round."""
    against = names[0]
    expected = rounds[0].outcomes[against]
    for turn in rounds:
        for name, outcome in turn.outcomes.items():
            place = _differ(outcome.token_ids, expected.token_ids)
            if place is not None:
                request, position = place
                return Difference(
                    contender=name,
                    against=against,
                    request=request,
                    position=position,
                    token_id=_at(outcome.token_ids[request], position),
                    expected=_at(expected.token_ids[request], position),
                )
    return None


def _differ(ours: TokenIds, theirs: TokenIds) -> tuple[int, int] | None:
    """(request, position) of the first token that is not the same."""
    for request, (some, others) in enumerate(zip(ours, theirs, strict=True)):
        for position in range(max(len(some), len(others))):
            if _at(some, position) != _at(others, position):
                return request, position
    return None


def _at(token_ids: list[int], position: int) -> int | None:
    return token_ids[position] if position < len(token_ids) else None
