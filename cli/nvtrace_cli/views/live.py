"""A run while it goes on: a live display on a terminal, else a line from time to time.

Everything here goes to stderr.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nvtrace import events as ev
from nvtrace.progress import Progress
from nvtrace_cli.stderr import tell
from nvtrace_cli.views.console import glyphs, is_terminal, make_console
from nvtrace_cli.views.text import count, escape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from nvtrace.catalog import Catalog
    from nvtrace.progress import RequestProgress
    from nvtrace_cli.views.console import Glyphs

_FRAMES_PER_SECOND = 12
_STEPS_BETWEEN_LINES = 50
_BAR_WIDTH = 30


class Reporter(Protocol):
    """The tap of a recorder that shows the run's progress."""

    progress: Progress

    def __call__(self, events: list[ev.Event]) -> None:
        """Take the events of a step, or those between two steps."""


@contextmanager
def reporting(catalog: Catalog, *, is_quiet: bool) -> Iterator[Reporter]:
    """The reporter that suits where stderr goes.

    Args:
        catalog: the words.
        is_quiet: say nothing at all.
    """
    if is_quiet:
        yield SilentReporter()
    elif is_terminal(stderr=True):
        console = make_console(stderr=True)
        start = Text(catalog.ui("live_starting"), style="quiet")
        with Live(start, console=console, auto_refresh=False) as live:
            yield LiveReporter(live, catalog, glyphs(console))
    else:
        yield LineReporter(catalog)


class SilentReporter:
    """Keeps the count and says nothing."""

    def __init__(self) -> None:
        self.progress = Progress()

    def __call__(self, events: list[ev.Event]) -> None:
        """Take in events."""
        self.progress.apply(events)


class LiveReporter:
    """A progress line for each request, redrawn in place."""

    def __init__(self, live: Live, catalog: Catalog, shapes: Glyphs) -> None:
        self.progress = Progress()
        self._live = live
        self._catalog = catalog
        self._shapes = shapes
        self._last_frame = float("-inf")

    def __call__(self, events: list[ev.Event]) -> None:
        """Take in events; redraw if the last frame is old enough, or nothing may follow."""
        self.progress.apply(events)
        is_last = not (self.progress.waiting_len or self.progress.running_len)
        now = time.monotonic()
        if is_last or now - self._last_frame >= 1 / _FRAMES_PER_SECOND:
            self._last_frame = now
            self._live.update(
                progress_view(self.progress, self._catalog, self._shapes), refresh=True
            )


def progress_view(progress: Progress, catalog: Catalog, shapes: Glyphs) -> RenderableType:
    """One line for each request, and one for the engine."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="label", no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    for request in progress.requests.values():
        grid.add_row(
            Text(catalog.ui("seq", ids=request.seq_id)),
            _bar(request, shapes),
            Text(f"{request.num_tokens}/{request.max_tokens}"),
            Text(_state(request, catalog), style=request.state),
        )
    return Group(grid, Text(_engine_line(progress, catalog), style="quiet"))


def _bar(request: RequestProgress, shapes: Glyphs) -> Text:
    filled = min(_BAR_WIDTH * request.num_tokens // request.max_tokens, _BAR_WIDTH)
    bar = Text(shapes.decode * filled, style="decode")
    if request.state == "ended":
        bar.append(shapes.ended, style="ended")
    bar.append(shapes.idle * (_BAR_WIDTH + 1 - len(bar)), style="quiet")
    return bar


def _state(request: RequestProgress, catalog: Catalog) -> str:
    if request.reason is not None:
        return catalog.ui("live_ended", reason=escape(request.reason))
    return catalog.ui(f"state_{request.state}")


def _engine_line(progress: Progress, catalog: Catalog) -> str:
    rate = progress.tokens_per_second
    return catalog.ui(
        "live_engine",
        step=count(progress.step),
        phase=progress.phase or "-",
        rate="-" if rate is None else count(round(rate)),
        waiting=count(progress.waiting_len),
        running=count(progress.running_len),
        free="-" if progress.free_blocks is None else count(progress.free_blocks),
    )


class LineReporter:
    """A line for what is worth one, and every so many steps; for files and pipes."""

    def __init__(self, catalog: Catalog) -> None:
        self.progress = Progress()
        self._catalog = catalog

    def __call__(self, events: list[ev.Event]) -> None:
        """Take in events."""
        self.progress.apply(events)
        for event in events:
            line = self._line(event)
            if line is not None:
                tell(line)

    def _line(self, event: ev.Event) -> str | None:
        words = self._catalog
        match event:
            case ev.EngineReady():
                return words.ui("line_ready", num_blocks=count(event.num_kvcache_blocks))
            case ev.RequestEnqueue():
                return words.ui(
                    "line_enqueue",
                    who=words.ui("seq", ids=event.seq_id),
                    prompt_len=event.prompt_len,
                    max_tokens=event.max_tokens,
                )
            case ev.RequestRefused():
                return escape(words.reason("REQUEST_REFUSED", event.reason))
            case ev.StateTransition():
                return words.ui(
                    "line_transition",
                    step=event.step or "-",
                    who=words.ui("seq", ids=event.seq_id),
                    previous=event.previous,
                    status=event.status,
                    reason=escape(words.reason("STATE_TRANSITION", event.reason)),
                    num_tokens=event.num_completion_tokens,
                )
            case ev.StepEnd() if event.step and event.step % _STEPS_BETWEEN_LINES == 0:
                return _engine_line(self.progress, words)
        return None
