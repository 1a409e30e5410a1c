"""Folding: steps that look alike become one row, as in "2 - 147".

Knows when two steps look alike and when a step must be seen on its own. Does not know words or
tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nvtrace_cli.summary import StepSummary


@dataclass(frozen=True, slots=True)
class Row:
    """Steps that follow one another and look alike.

    Attributes:
        steps: in their order, at least one.
        batch_before: the batch size of the decode step before, if it was another one and nothing
            else in this row says why.
    """

    steps: tuple[StepSummary, ...]
    batch_before: int | None = None

    @property
    def first(self) -> StepSummary:
        """The first of the steps."""
        return self.steps[0]

    @property
    def last(self) -> StepSummary:
        """The last of the steps."""
        return self.steps[-1]

    @property
    def is_folded(self) -> bool:
        """Does the row stand for more than one step?"""
        return len(self.steps) > 1

    @property
    def wall_ns(self) -> float | None:
        """The step's time, or the median of several; None if no step ended."""
        times = [step.wall_ns for step in self.steps if step.wall_ns is not None]
        return median(times) if times else None


def fold(steps: Iterable[StepSummary], *, is_unfolded: bool = False) -> list[Row]:
    """Group steps into rows.

    Args:
        steps: in their order; gaps are allowed and never folded over.
        is_unfolded: give every step a row of its own.
    """
    rows: list[Row] = []
    group: list[StepSummary] = []
    group_batch_before: int | None = None
    for step, batch_before in _with_batch_before(steps):
        stands_alone = is_unfolded or batch_before is not None or group_batch_before is not None
        if group and (stands_alone or not _looks_alike(group[-1], step)):
            rows.append(Row(tuple(group), group_batch_before))
            group = []
        if not group:
            group_batch_before = batch_before
        group.append(step)
    if group:
        rows.append(Row(tuple(group), group_batch_before))
    return rows


def _with_batch_before(steps: Iterable[StepSummary]) -> Iterator[tuple[StepSummary, int | None]]:
    before: StepSummary | None = None
    for step in steps:
        batch_before = None
        if before and before.phase == step.phase == "decode" and not step.preempted:
            batch_before = before.scheduled if before.scheduled != step.scheduled else None
        yield step, batch_before
        before = step


def _is_notable(step: StepSummary) -> bool:
    """Must the step be seen on its own?"""
    events = (step.arrived, step.aborted, step.admitted, step.preempted, step.finished)
    completes_prompt = any(share.is_complete for share in step.prefills)
    return (
        any(events)
        or completes_prompt
        or step.phase is None
        or step.error is not None
        or (step.wall_ns is None and not step.is_led)
    )


def _looks_alike(before: StepSummary, step: StepSummary) -> bool:
    """May `step` join the row that ends with `before`?"""
    return (
        step.index == before.index + 1
        and not _is_notable(before)
        and not _is_notable(step)
        and step.phase == before.phase
        and step.seq_ids == before.seq_ids
        and step.scheduled == before.scheduled
        and step.waiting == before.waiting
        and step.running == before.running
        and _stop_key(step) == _stop_key(before)
    )


def _stop_key(step: StepSummary) -> tuple[int, str] | None:
    return None if step.stop is None else (step.stop.seq_id, step.stop.reason)
