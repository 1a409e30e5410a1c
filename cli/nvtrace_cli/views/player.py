"""The player: a recorded run in time, its timeline growing step by step.

Only used on a terminal.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.text import Text

from nvtrace.summary import fold_alike
from nvtrace_cli.views.step_table import step_table
from nvtrace_cli.views.text import count, duration, ids
from nvtrace_cli.views.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console, RenderableType

    from nvtrace.catalog import Catalog
    from nvtrace.summary import StepSummary

_FRAMES_PER_SECOND = 20
_ROWS_SHOWN = 6


class Pacer:
    """Waits as long as the run did, divided by the speed.

    Args:
        speed: infinity never waits.
        clock, sleep: for tests.
    """

    def __init__(
        self,
        speed: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.speed = speed
        self._clock = clock
        self._sleep = sleep
        self._start: tuple[float, int] | None = None  # (clock time, trace time) of the first moment

    def wait_until(self, ts_ns: int | None) -> None:
        """Sleep until a moment of the trace; the first call sets the beginning."""
        if ts_ns is None:
            return
        if self._start is None:
            self._start = (self._clock(), ts_ns)
        began, began_ns = self._start
        remaining = began + (ts_ns - began_ns) / 1e9 / self.speed - self._clock()
        if remaining > 0:
            self._sleep(remaining)


def play(
    steps: Sequence[StepSummary],
    seq_ids: Sequence[int],
    catalog: Catalog,
    console: Console,
    pacer: Pacer,
    *,
    has_timeline: bool,
) -> None:
    """Show the steps one after the other, then clear the screen for the whole picture."""
    last_frame = float("-inf")
    last = steps[-1].index
    with Live(console=console, transient=True, auto_refresh=False) as live:
        for index, step in enumerate(steps):
            pacer.wait_until(step.end_ns)
            now = time.monotonic()
            if now - last_frame >= 1 / _FRAMES_PER_SECOND or index + 1 == len(steps):
                last_frame = now
                shown = steps[: index + 1]
                timeline = Timeline(shown, seq_ids, catalog, last) if has_timeline else None
                live.update(frame(shown, timeline, catalog, console, last), refresh=True)


def frame(
    steps: Sequence[StepSummary],
    timeline: Timeline | None,
    catalog: Catalog,
    console: Console,
    last: int,
) -> RenderableType:
    """The picture after these steps of a run whose last step is `last`."""
    step = steps[-1]
    parts: list[RenderableType] = []
    if timeline is not None:
        parts += [timeline, Text()]
    parts.append(
        Text(
            catalog.ui(
                "play_status",
                step=count(step.index),
                last=count(last),
                time=duration(step.end_ns - steps[0].start_ns),
                batch=ids(step.seq_ids),
                waiting=ids(step.waiting) or "-",
                free=count(step.free_blocks),
            )
        )
    )
    room = console.height - sum(len(console.render_lines(part)) for part in parts)
    rows = fold_alike(steps)[-_ROWS_SHOWN:]
    while rows:  # the newest ones that fit, whatever lines each takes
        table = step_table(rows, catalog)
        if len(console.render_lines(table)) <= room:
            parts.append(table)
            break
        rows = rows[1:]
    return Group(*parts)
