"""Replay on the terminal: puts header, timeline, step table and totals together, or plays them.

Each part is drawn in its own file.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from rich.text import Text

from nvtrace.caveats import saying_untimed, saying_whose
from nvtrace.envelope import Footer, Header
from nvtrace.reader import name_of, read_first_rank, read_ranks
from nvtrace.replay import InconsistentTraceError
from nvtrace.summarize import summarize
from nvtrace.summary import fold_alike
from nvtrace_cli.failures import UsageError
from nvtrace_cli.views.console import is_terminal, make_console
from nvtrace_cli.views.header import header_panel
from nvtrace_cli.views.log import log_lines
from nvtrace_cli.views.machine import json_line, record_line, step_object
from nvtrace_cli.views.player import Pacer, play
from nvtrace_cli.views.prose import Prose
from nvtrace_cli.views.reading import reading_bar
from nvtrace_cli.views.step_table import plain_lines, step_table
from nvtrace_cli.views.timeline import Timeline
from nvtrace_cli.views.totals import totals

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from rich.console import Console

    from nvtrace.catalog import Catalog
    from nvtrace.query import Selection
    from nvtrace.summary import RunSummary, StepSummary


@dataclass(frozen=True, slots=True)
class Replay:
    """One trace, to be shown.

    Attributes:
        source: path of the trace, "-" for stdin.
        selection: what to show of it.
        catalog: the words.
        warn: takes a sentence about an incomplete trace.
        speed: 2.0 plays at twice the run's speed, infinity without waiting, None does not play.
        is_unfolded: give every step a row of its own.
    """

    source: str
    selection: Selection
    catalog: Catalog
    warn: Callable[[str], None]
    speed: float | None = None
    is_unfolded: bool = False

    @property
    def name(self) -> str:
        """The name of the trace on the screen."""
        return PurePath(name_of(self.source)).name

    def show(self, *, has_frame: bool, has_timeline: bool, has_steps: bool) -> None:
        """Draw the run.

        Args:
            has_frame: begin with the header panel and end with the totals.
            has_timeline: draw the timeline.
            has_steps: draw the step table.
        """
        run, steps = self._read()
        console = make_console()
        seq_ids = self._seq_ids(run, steps)
        if has_frame:
            console.print(header_panel(run, self.name, self.catalog, console))
            console.print()
        if steps and self.speed is not None and is_terminal():
            play(
                steps, seq_ids, self.catalog, console, Pacer(self.speed), has_timeline=has_timeline
            )
        if not steps:
            console.print(Prose((self.catalog.ui("no_steps"), "quiet")))
        if steps and has_timeline:
            console.print(Timeline(run.steps, seq_ids, self.catalog))
            console.print()
        if steps and has_steps:
            rows = fold_alike(steps, is_unfolded=self.is_unfolded)
            console.print(step_table(rows, self.catalog))
        if has_frame:
            console.print()
            console.print(totals(run, seq_ids, self.catalog, console))
        self._complain(run)

    def show_json(self) -> None:
        """One JSON object per step."""
        run, steps = self._read()
        for step in steps:
            print_line(json_line(step_object(step)))
        self._complain(run)

    def show_plain(self) -> None:
        """The step table with tabs."""
        run, steps = self._read()
        for line in plain_lines(fold_alike(steps, is_unfolded=self.is_unfolded), self.catalog):
            print_line(line)
        self._complain(run)

    def show_log(self, *, as_json: bool) -> None:
        """One line per event: in the article's form, or as JSON."""
        console = make_console()
        is_animated = self.speed is not None and is_terminal() and not as_json
        pacer = Pacer(self.speed) if is_animated and self.speed is not None else None
        is_any_picked = False
        for rank, record in read_ranks(self.source, warn=self.warn):
            if isinstance(record, Header | Footer):
                if as_json and self.selection.is_everything:
                    print_line(record_line(record, rank))
                continue
            if not self.selection.picks_event(record):
                continue
            is_any_picked = True
            if pacer is not None:
                pacer.wait_until(getattr(record, "ts_ns", None))
            if as_json:
                print_line(record_line(record, rank))
            else:
                print_log(log_lines(record, self.catalog, rank), console)
        if not is_any_picked:
            self.warn("these options select no event of the trace")

    def _read(self) -> tuple[RunSummary, list[StepSummary]]:
        """The run with the steps in range, and the selected ones among them."""
        with reading_bar(self.source) as bar:
            records = read_first_rank(self.source, warn=self.warn, watch=bar)
            records = saying_whose(records, self.source, self.warn)
            records = saying_untimed(records, self.source, self.warn)
            run = summarize(records, is_wanted=self.selection.has_step)
        if run.broken is None:
            self._refuse_missing(run)
        elif not run.steps:
            self._complain(run)
        return run, [step for step in run.steps if self.selection.picks_step(step)]

    def _refuse_missing(self, run: RunSummary) -> None:
        """Refuse steps and requests that the trace does not have."""
        if run.last_step is not None and not run.steps:
            extent = f"steps {run.first_step} to {run.last_step}"
            raise UsageError(f"--steps selects no step: {self.name} has {extent}")
        missing = sorted((self.selection.seq_ids or frozenset()) - run.requests.keys())
        if missing:
            known = (
                f"requests {min(run.requests)} to {max(run.requests)}" if run.requests else "none"
            )
            raise UsageError(f"--seq {missing[0]}: no such request, {self.name} has {known}")

    def _complain(self, run: RunSummary) -> None:
        """Report what is inconsistent in the trace, after everything before it is shown."""
        if run.broken is not None:
            raise InconsistentTraceError(f"{self.name}: {run.broken}") from run.broken

    def _seq_ids(self, run: RunSummary, steps: list[StepSummary]) -> list[int]:
        """The requests to show: all, the selected ones, or those present in these steps."""
        wanted: Collection[int] | None = self.selection.seq_ids
        if wanted is None and self.selection.has_bounds:
            wanted = set().union(*(step.present for step in steps))
        return [seq_id for seq_id in run.requests if wanted is None or seq_id in wanted]


def print_log(lines: list[str], console: Console) -> None:
    """Print lines of the log, in colours on a terminal."""
    for line in lines:
        if console.is_terminal and not console.no_color:
            console.print(_coloured(line), soft_wrap=True)
        else:
            print_line(line)


def _coloured(line: str) -> Text:
    """The line with the event's name highlighted."""
    name, separator, _ = line.partition(" | ")
    text = Text(line)
    text.stylize("heading" if separator else "quiet", 0, len(name))
    return text


def print_line(line: str) -> None:
    """Print one line of data on stdout, unchanged."""
    sys.stdout.write(line + "\n")


def parse_speed(text: str) -> float:
    """How fast to play: "1x", "2.5x", "max".

    Raises:
        UsageError: it is neither.
    """
    if text == "max":
        return float("inf")
    try:
        speed = float(text.removesuffix("x"))
    except ValueError:
        speed = 0.0
    if not 0.0 < speed < float("inf"):
        raise UsageError(f"--speed {text}: write 1x, 10x, 0.5x or max")
    return speed
