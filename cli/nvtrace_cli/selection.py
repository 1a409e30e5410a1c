"""Selection: which steps, requests and events the reader asked for.

Knows the spelling of `--steps`, `--seq` and `--event`, and what each picks. Does not know tables.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvtrace import events as ev
from nvtrace.envelope import Unknown
from nvtrace_cli.failures import UsageError

if TYPE_CHECKING:
    from nvtrace.summary import RunSummary, StepSummary


@dataclass(frozen=True, slots=True)
class Selection:
    """What to show.

    Attributes:
        first_step, last_step: both included; None for no bound.
        seq_ids: these requests only; None for all.
        event_glob: events whose name matches, in capitals; None for all.
    """

    first_step: int | None = None
    last_step: int | None = None
    seq_ids: frozenset[int] | None = None
    event_glob: str | None = None

    @classmethod
    def parse(cls, steps: str | None, seq_ids: list[int], event_glob: str | None) -> Selection:
        """Read the options of the command line.

        Raises:
            UsageError: a range that is none, or a pattern that no event can match.
        """
        first, last = (None, None) if steps is None else _parse_steps(steps)
        pattern = None if event_glob is None else event_glob.upper()
        if pattern is not None and not fnmatch.filter(ev.EVENT_TYPES, pattern):
            raise UsageError(
                f"--event {event_glob}: no event has such a name; `nvtrace events` lists them all"
            )
        return cls(first, last, frozenset(seq_ids) or None, pattern)

    @property
    def is_everything(self) -> bool:
        """Is nothing left out?"""
        return self == Selection()

    @property
    def has_bounds(self) -> bool:
        """Is it about a range of steps?"""
        return self.first_step is not None or self.last_step is not None

    def has_step(self, index: int | None) -> bool:
        """Is this engine step wanted? What happens outside a step is wanted if all steps are."""
        if index is None:
            return not self.has_bounds
        return (self.first_step or 0) <= index and (
            self.last_step is None or index <= self.last_step
        )

    def has_name(self, tag: str) -> bool:
        """Is an event of this name wanted?"""
        return self.event_glob is None or fnmatch.fnmatchcase(tag, self.event_glob)

    def picks_event(self, event: ev.Event | Unknown) -> bool:
        """Is this event wanted?"""
        if isinstance(event, Unknown):
            step = event.fields.get("step")
            in_steps = self.has_step(step if isinstance(step, int) else None)
            return in_steps and self.seq_ids is None and self.has_name(event.event)
        return (
            self.has_step(event.step)
            and self.has_name(ev.tag_of(event))
            and (self.seq_ids is None or bool(self.seq_ids & requests_of(event)))
        )

    def picks_step(self, step: StepSummary) -> bool:
        """Does this step's row belong into the table?"""
        if not self.has_step(step.index):
            return False
        if self.event_glob is not None and not fnmatch.filter(step.tags, self.event_glob):
            return False
        return self.seq_ids is None or bool(self.seq_ids & _requests_in(step))

    def check(self, run: RunSummary, name: str) -> None:
        """Complain about steps and requests that the trace does not have.

        Raises:
            UsageError: saying which ones it has.
        """
        if run.last_step is not None and not any(self.has_step(step.index) for step in run.steps):
            extent = f"steps {run.first_step} to {run.last_step}"
            raise UsageError(f"--steps selects no step: {name} has {extent}")
        missing = sorted((self.seq_ids or frozenset()) - run.requests.keys())
        if missing:
            known = (
                f"requests {min(run.requests)} to {max(run.requests)}" if run.requests else "none"
            )
            raise UsageError(f"--seq {missing[0]}: no such request, {name} has {known}")


def _parse_steps(text: str) -> tuple[int | None, int | None]:
    first, dots, last = text.partition("..")
    try:
        bounds = (int(first) if first else None, int(last) if last else None)
    except ValueError:
        bounds = (None, None)
    if not dots:
        bounds = (bounds[0], bounds[0])
    if bounds == (None, None):
        raise UsageError(f"--steps {text}: write 17, 100..150, 100.. or ..150")
    if bounds[0] is not None and bounds[1] is not None and bounds[0] > bounds[1]:
        raise UsageError(f"--steps {text}: the first step comes after the last")
    return bounds


def requests_of(event: ev.Event) -> set[int]:
    """The requests that an event names."""
    seq_ids: set[int] = set()
    for name in ("seq_id", "for_seq_id"):
        value = getattr(event, name, None)
        if value is not None:
            seq_ids.add(value)
    for name in ("seq_ids", "finished"):
        seq_ids.update(getattr(event, name, ()))
    return seq_ids


def requests_there(step: StepSummary) -> set[int]:
    """The requests that were there in a step: part of it, or in one of the queues."""
    return _requests_in(step).union(step.waiting, step.running)


def _requests_in(step: StepSummary) -> set[int]:
    seq_ids = {
        *step.seq_ids,
        *step.arrived,
        *step.aborted,
        *(seq_id for seq_id, _ in step.finished),
    }
    for event in (*step.preempted, *([step.stop] if step.stop else [])):
        seq_ids |= requests_of(event)
    return seq_ids
