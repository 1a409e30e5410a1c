"""A frame of the browser: one step among its neighbours, the queues, the blocks, the events.

    trace.jsonl  step 149 of 256                                       +1.23 s
    decode: nothing can be admitted                                 at its end
    ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━●╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌
       step  phase   seqs  what happened
    ▸   149  decode     2  seq 0 ends: max_tokens
        150  decode     1  one token each

The frame is made of panes. Other views draw the pool and the whole state. `browse_model.py` handles
keys, `nvtrace.step_cache` finds the moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import ConsoleDimensions, Group
from rich.control import Control
from rich.layout import Layout
from rich.screen import Screen as FullScreen
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from nvtrace import events as ev
from nvtrace_cli.views.at import state_parts
from nvtrace_cli.views.browser_table import near_table
from nvtrace_cli.views.console import glyphs, make_console
from nvtrace_cli.views.log import log_line
from nvtrace_cli.views.pool_map import num_map_rows, pool_legend, small_pool_map
from nvtrace_cli.views.prose import Prose
from nvtrace_cli.views.text import count, duration, escape, ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from nvtrace.catalog import Catalog
    from nvtrace.step_cache import StepDetails
    from nvtrace.summary import StepSummary
    from nvtrace_cli.browse_model import Message, View

SMALLEST = (30, 8)  # columns and rows
_HEAD_ROWS = 3
_EMPTY = Text(" ")  # a false value would leave the layout empty
_QUEUES = ("running", "waiting", "free", "batch")
# Rows: below the first the batch is left out, below the second the pool, then all queues.
_TALL, _LOW, _LOWEST = 28, 20, 14
_POOL_SHARE, _EVENT_SHARE = 6, 2.5  # one row in so many
_HINTS = ("play", "step", "marker", "go", "search", "state", "help", "quit")
_PAGE_HINTS = ("scroll", "step", "marker", "back", "quit")
_HELP = (
    *("step", "ten", "ends", "marker", "play", "rate", "moment", "go", "search", "again"),
    *("state", "events", "scroll", "back", "quit"),
)


@dataclass(frozen=True, slots=True)
class Scene:
    """What a frame shows.

    Attributes:
        view: the state of the browser.
        look: the moment.
        near: the step and its neighbours.
        first, last: the trace's steps.
    """

    view: View
    look: StepDetails
    near: list[StepSummary]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """How many rows each pane gets; 0 leaves it out."""

    table: int
    queues: int
    pool: int
    events: int

    @classmethod
    def of(cls, rows: int, num_map_rows: int) -> _Rows:
        queues = 0 if rows < _LOWEST else len(_QUEUES) - (rows < _TALL)
        fixed = _HEAD_ROWS + 1 + 1 + (queues + 1 if queues else 0)  # the last row, and empty rows
        if rows < _LOW or not num_map_rows:
            events = int((rows - fixed) // _EVENT_SHARE)
            return cls(rows - fixed - events, queues, 0, events)
        rest = rows - fixed - 2  # the pool's title, and an empty row
        pool = min(max(rest // _POOL_SHARE, 1), num_map_rows)
        events = int((rest - pool) // _EVENT_SHARE)
        return cls(rest - pool - events, queues, pool, events)


class Screen:
    """A whole screen, redrawn for each frame.

    Args:
        name: of the trace.
        catalog: the words.
    """

    def __init__(self, name: str, catalog: Catalog) -> None:
        self._name = name
        self._catalog = catalog
        self._console = make_console()

    def draw(self, scene: Scene, columns: int, rows: int) -> int:
        """Draw a frame. Returns how far its pane can be scrolled."""
        self._console.size = ConsoleDimensions(columns, rows)
        if columns < SMALLEST[0] or rows < SMALLEST[1]:
            self._show(Text(self._ui("small", text="{} x {}".format(*SMALLEST))))
            return 0
        foot = Layout(self._foot(scene.view), size=1)
        if scene.view.page == "steps":
            layout = Layout()
            layout.split_column(*self._step_page(scene, columns, rows), foot)
            self._show(layout)
            return 0
        lines = self._console.render_lines(Group(*self._page(scene)), pad=False)
        room = rows - 2
        furthest = max(len(lines) - room, 0)
        start = min(scene.view.scroll, furthest)
        layout = Layout()
        layout.split_column(Layout(_Lines(lines[start : start + room])), foot)
        self._show(layout)
        return furthest

    def say(self, message: Message, columns: int, rows: int) -> None:
        """Show a message in the last row, and leave the rest of the frame as it is."""
        self._console.size = ConsoleDimensions(columns, rows)
        line = Text(self._message(message), style="warning", no_wrap=True, overflow="ellipsis")
        line.truncate(columns, overflow="ellipsis", pad=True)
        with self._console:
            self._console.control(Control.move_to(0, rows - 1))
            self._console.print(line, end="")

    def _show(self, renderable: RenderableType) -> None:
        with self._console:  # one write: no flicker
            self._console.control(Control.home())
            self._console.print(FullScreen(renderable), end="")

    def _ui(self, key: str, **values: object) -> str:
        return self._catalog.ui(f"browse_{key}", **values)

    # -- the step --------------------------------------------------------------------------------

    def _step_page(self, scene: Scene, columns: int, rows: int) -> Iterator[Layout]:
        share = _Rows.of(rows, num_map_rows(scene.look.moment.state, self._console))
        pointer = "▸" if self._console.encoding.startswith("utf") else ">"
        table = near_table(
            scene.near,
            scene.view.step,
            scene.last,
            self._catalog,
            pointer,
            width=columns,
            num_rows=share.table - 1,
        )
        yield Layout(self._head(scene, columns), size=_HEAD_ROWS)
        yield Layout(table, size=share.table)
        yield Layout(_EMPTY, size=1)
        if share.queues:
            yield Layout(self._queues(scene.look, columns, share.queues), size=share.queues)
            yield Layout(_EMPTY, size=1)
        if share.pool:
            yield Layout(self._pool(scene.look, share.pool), size=share.pool + 1)
            yield Layout(_EMPTY, size=1)
        yield Layout(self._events(scene.look, share.events))

    def _head(self, scene: Scene, columns: int) -> RenderableType:
        view, look = scene.view, scene.look
        where = self._ui("where", step=count(view.step), last=count(scene.last))
        title = Text.assemble((escape(self._name), "heading"), "  ", where)
        time = f"+{duration(look.summary.end_ns)}"
        if view.is_playing:
            time = f"{self._ui('playing', rate=view.rate)}   {time}"
        schedule, phase = look.moment.schedule, look.moment.phase
        if schedule is None or phase is None:
            reason = Text(self._catalog.ui("at_no_schedule"), style="error")
        else:
            words = escape(self._catalog.reason(ev.tag_of(schedule), schedule.reason))
            chosen = self._catalog.ui("explain_chosen", phase=phase, reason=words)
            reason = Text(chosen, style=phase)
        moment = Text(self._ui(f"moment_{look.moment.point}"), style="quiet")
        return Group(
            _both_ends(title, Text(time, style="decode" if view.is_playing else "quiet")),
            _both_ends(reason, moment),
            self._track(scene, columns),
        )

    def _track(self, scene: Scene, columns: int) -> Text:
        """Where the step is between the first and the last, as a bar."""
        shapes = glyphs(self._console)
        way = max(scene.last - scene.first, 1)
        place = (scene.view.step - scene.first) * (columns - 1) // way
        rest = shapes.idle * (columns - 1 - place)
        return Text.assemble(
            (shapes.decode * place, "quiet"), (shapes.ended, "ended"), (rest, "quiet")
        )

    def _queues(self, look: StepDetails, columns: int, num_rows: int) -> Table:
        state, schedule = look.moment.state, look.moment.schedule
        queues = {
            "running": state.running,
            "waiting": state.waiting,
            "batch": [] if schedule is None else schedule.seq_ids,
            "free": list(state.free_blocks),
        }
        grid = Table.grid(padding=(0, 2, 0, 0))
        labels = {name: Text(self._catalog.ui(f"at_{name}")) for name in _QUEUES}
        width = max(label.cell_len for label in labels.values())
        grid.add_column(style="label", no_wrap=True, min_width=width)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        for name in _QUEUES[:num_rows]:
            queue = queues[name]
            line = self._catalog.ui("at_queue", count=count(len(queue)), ids=ids(queue, columns))
            style = "quiet" if not queue else "waiting" if name == "waiting" else ""
            text = Text(line if queue else "-", style, no_wrap=True, overflow="ellipsis")
            grid.add_row(labels[name], text)
        return grid

    def _pool(self, look: StepDetails, num_rows: int) -> RenderableType:
        state = look.moment.state
        per_cell, lines = small_pool_map(state, self._console, num_rows)
        num_blocks = count(state.num_blocks)
        title = self._catalog.ui(
            "at_pool_title", num_blocks=num_blocks, block_size=state.block_size
        )
        scale = self._ui("cell", count=per_cell) if per_cell > 1 else ""
        return Group(_both_ends(Text(title, "heading"), Text(scale, "quiet")), *lines)

    def _events(self, look: StepDetails, num_rows: int) -> Group:
        """The step's events; also those between it and the previous step, if there is room."""
        num_all = len(look.events)
        if num_all <= num_rows:
            return Group(*(self._event(look, place) for place in range(num_all)))
        own = [place for place, event in enumerate(look.events) if event.step is not None]
        shown, last = own[: max(num_rows - 2, 0)], own[-1:]
        if num_rows == 1:
            return Group(*(self._event(look, place) for place in last))
        more = self._ui("more", count=count(num_all - len(shown) - len(last)))
        return Group(
            *(self._event(look, place) for place in shown),
            Text(more, style="quiet"),
            *(self._event(look, place) for place in last),
        )

    def _event(self, look: StepDetails, place: int) -> Text:
        """An event as in the log, without what the frame shows already."""
        event = look.events[place]
        line = log_line(event, self._catalog).removeprefix("TEACHING/")
        line = line.replace(f" | phase={escape(event.phase)}", "", 1)
        text = Text(line, no_wrap=True, overflow="ellipsis")
        if place >= look.num_done:
            text.stylize("quiet")
        elif " | " in line:
            text.stylize("heading", 0, line.index(" | "))
        return text

    # -- the other pages -------------------------------------------------------------------------

    def _page(self, scene: Scene) -> Iterator[RenderableType]:
        look = scene.look
        if scene.view.page == "help":
            yield self._help()
            if look.moment.state.num_blocks:
                yield from (Text(), pool_legend(look.moment.state, self._catalog, self._console))
        elif scene.view.page == "state":
            yield from state_parts(look.moment, self._name, self._catalog, self._console)
        else:
            where = self._ui("where", step=count(scene.view.step), last=count(scene.last))
            yield Text(self._ui("events_title", where=where), style="heading")
            for place, event in enumerate(look.events):
                style = "" if place < look.num_done else "quiet"
                yield Text()
                yield Prose((log_line(event, self._catalog), style))

    def _help(self) -> RenderableType:
        grid = Table.grid(padding=(0, 3, 0, 0))
        grid.add_column(style="heading", no_wrap=True)
        grid.add_column()
        for name in _HELP:
            grid.add_row(Text(self._ui(f"keys_{name}")), Prose((self._ui(f"help_{name}"), "")))
        return Group(Text(self._ui("help_title"), style="heading"), Text(), grid)

    # -- the last row ----------------------------------------------------------------------------

    def _foot(self, view: View) -> Text:
        if view.prompt is not None:
            line = Text(f"{self._ui(f'prompt_{view.prompt.kind}')} ", style="heading")
            line.append(escape(view.prompt.text), style="not bold")
            line.append(" ", style="reverse")
            return line
        if view.message is not None:
            line = Text(self._message(view.message), style="warning")
        else:
            line = Text()
            for name in _HINTS if view.page == "steps" else _PAGE_HINTS:
                line.append(self._ui(f"hint_key_{name}"), style="heading")
                line.append(f" {self._ui(f'hint_{name}')}  ", style="quiet")
        line.no_wrap, line.overflow = True, "ellipsis"
        return line

    def _message(self, message: Message) -> str:
        return self._ui(message.key, text=escape(message.text))


class _Lines:
    """Lines that are rendered already."""

    def __init__(self, lines: list[list[Segment]]) -> None:
        self._lines = lines

    def __rich_console__(self, _console: Console, _options: ConsoleOptions) -> RenderResult:
        for line in self._lines:
            yield from line
            yield Segment.line()


def _both_ends(left: Text, right: Text) -> Table:
    """One line: the first text at its beginning, the second at its end."""
    grid = Table.grid(expand=True, padding=(0, 0, 0, 2))
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, right)
    return grid
