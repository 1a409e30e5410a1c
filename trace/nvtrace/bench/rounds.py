"""Rounds: the order of runs, and statistics over several rounds.

The speed of a machine varies. So all contenders run in each round, in every other round in reverse
order, and ratios are computed within a round: what slows both down cancels out. The first round
warms up caches and allocators, and is not counted.
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
    """The result of a contender's run.

    Attributes:
        token_ids: the generated tokens of each request, in the requests' order.
        step_ns: step number -> nanoseconds, measured outside of the engine; empty for contenders
            without steps.
    """

    token_ids: TokenIds
    step_ns: dict[int, int] = field(default_factory=dict)


class Contender(Protocol):
    """An engine that can run a workload.

    Attributes:
        name: in the report.
        settings: its own settings, in a few words.
    """

    name: str
    settings: str

    def ready(self, workload: Workload) -> AbstractContextManager[None]:
        """A context manager around a round of this workload; preparing is not timed."""
        ...

    def run(self, workload: Workload) -> Outcome:
        """Run the workload; this is timed."""
        ...


@dataclass(frozen=True, slots=True)
class Round:
    """One run of every contender, by name: its time, its CPU time, and its result."""

    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)


def run_rounds(
    contenders: Sequence[Contender], workload: Workload, num_rounds: int, say: Callable[[str], None]
) -> list[Round]:
    """Run all rounds.

    Args:
        contenders: at least one.
        workload: the same for all.
        num_rounds: how many are counted; there is one warm-up round before them.
        say: called with a progress message after each run.

    Returns:
        The rounds, including the first one, which is not counted.
    """
    rounds = []
    for number in range(num_rounds + 1):
        turn = Round()
        which = f"round {number} of {num_rounds}" if number else "warming up"
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            name = contender.name
            with contender.ready(workload):
                gc.collect()  # collect the garbage of the previous contender before the time starts
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
    """How many times as fast the first contender is as each of the others, by round."""
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
    """Find a token that differs from those of the first contender in the first round."""
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
    """(request, position) of the first token that differs."""
    for request, (some, others) in enumerate(zip(ours, theirs, strict=True)):
        for position in range(max(len(some), len(others))):
            if _at(some, position) != _at(others, position):
                return request, position
    return None


def _at(token_ids: list[int], position: int) -> int | None:
    return token_ids[position] if position < len(token_ids) else None
