"""The timeline: one row a request, engine steps along the width, the batch size beneath.

    seq 0   █━━━━━━━━━━━━━●
    seq 1   █━━━━━━━━━━━━━━━━━━━━━━━━●
    batch   ███████████████▄▄▄▄▄▄▄▄▄▄▄
            2              1
    step    1         100       200

Each step is one mark; if there are few steps, there is space between the marks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from nvtrace_cli.views.console import glyphs
from nvtrace_cli.views.text import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderResult

    from nvtrace.catalog import Catalog
    from nvtrace.summary import RequestState, StepSummary
    from nvtrace_cli.views.console import Glyphs

_MAX_COLUMNS_PER_STEP = 4
_NICE = (1, 2, 5)


# If a column has several states, the last of these is drawn. None: the request is absent.
_BY_RANK: tuple[RequestState | None, ...] = (
    *(None, "waiting", "idle", "decode", "ended", "prefill", "preempted"),
)
_RANKS = {state: rank for rank, state in enumerate(_BY_RANK)}
_LEGEND: tuple[RequestState, ...] = (  # in the order of a request's life
    *("waiting", "prefill", "decode", "idle", "preempted", "ended"),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How steps are spread over columns.

    Attributes:
        first: the step in the first column.
        num_steps: steps shown.
        steps_per_column: at least 1; more where steps are many.
        columns_per_step: at least 1; more where steps are few.
    """

    first: int
    num_steps: int
    steps_per_column: int
    columns_per_step: int

    @classmethod
    def fit(cls, first: int, last: int, width: int) -> Scale:
        """Spread the steps first..last over at most `width` columns."""
        num_steps = last - first + 1
        columns_per_step = min(max(width // num_steps, 1), _MAX_COLUMNS_PER_STEP)
        return cls(first, num_steps, -(-num_steps // width), columns_per_step)

    @property
    def num_columns(self) -> int:
        """Columns that the steps fill."""
        return -(-self.num_steps // self.steps_per_column) * self.columns_per_step

    def column(self, step: int) -> int:
        """Where a step begins."""
        return (step - self.first) // self.steps_per_column * self.columns_per_step


class Timeline:
    """A rich renderable.

    Args:
        steps: in their order, at least one.
        seq_ids: the requests to draw, in the order of their rows.
        catalog: the words.
        last: the last step on the axis, if the run is still going on; the last of `steps` if None.
    """

    def __init__(
        self,
        steps: Sequence[StepSummary],
        seq_ids: Sequence[int],
        catalog: Catalog,
        last: int | None = None,
    ) -> None:
        self.steps = steps
        self.seq_ids = seq_ids
        self.catalog = catalog
        self.last = steps[-1].index if last is None else last

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it at the available width."""
        shapes = glyphs(console)
        labels = [self.catalog.ui("seq", ids=seq_id) for seq_id in self.seq_ids]
        names = [self.catalog.ui(key) for key in ("timeline_batch", "timeline_step")]
        margin = max(Text(label).cell_len for label in (*labels, *names)) + 2
        scale = Scale.fit(self.steps[0].index, self.last, max(options.max_width - margin, 1))
        cells = self._cells(scale)
        lines = [
            _labelled(label, margin, _row(cells[seq_id], shapes))
            for label, seq_id in zip(labels, self.seq_ids, strict=True)
        ]
        batch = self._batch_sizes(scale)
        marks = [size if i % scale.columns_per_step == 0 else None for i, size in enumerate(batch)]
        bars = [_bars(marks, shapes)] if shapes.bars else []
        for name, line in zip((names[0], ""), (*bars, _changes(batch)), strict=False):
            lines.append(_labelled(name, margin, line))
        lines.append(_labelled(names[1], margin, _axis(scale, options.max_width - margin)))
        lines += [Text(), self._legend(cells, shapes, margin)]
        yield Group(self._title(scale), *lines)

    def _title(self, scale: Scale) -> Text:
        first, last = scale.first, scale.first + scale.num_steps - 1
        key = "timeline_scale_one" if scale.steps_per_column == 1 else "timeline_scale"
        return Text.assemble(
            (self.catalog.ui("timeline_title"), "heading"),
            "  ",
            (
                self.catalog.ui(
                    key, first=count(first), last=count(last), steps=scale.steps_per_column
                ),
                "quiet",
            ),
        )

    def _cells(self, scale: Scale) -> dict[int, list[RequestState | None]]:
        cells: dict[int, list[RequestState | None]] = {
            seq_id: [None] * scale.num_columns for seq_id in self.seq_ids
        }
        for step in self.steps:
            column = scale.column(step.index)
            for seq_id, states in step.states():
                if seq_id not in cells:
                    continue
                row = cells[seq_id]
                for place, state in enumerate(states[: scale.columns_per_step], start=column):
                    if _RANKS[state] > _RANKS[row[place]]:
                        row[place] = state
        return cells

    def _batch_sizes(self, scale: Scale) -> list[int | None]:
        """The largest batch of each column; None where there is no step."""
        sizes: list[int | None] = [None] * scale.num_columns
        for step in self.steps:
            column = scale.column(step.index)
            largest = max(sizes[column] or 0, step.scheduled)
            stop = column + scale.columns_per_step
            sizes[column:stop] = [largest] * scale.columns_per_step
        return sizes

    def _legend(
        self, cells: dict[int, list[RequestState | None]], shapes: Glyphs, margin: int
    ) -> Text:
        seen = {state for row in cells.values() for state in row}
        legend = Text(" " * margin)
        for state in (state for state in _LEGEND if state in seen):
            legend.append(getattr(shapes, state), style=state)
            legend.append(f" {self.catalog.ui(f'state_{state}')}   ")
        legend.rstrip()
        return legend


def _row(cells: list[RequestState | None], shapes: Glyphs) -> Text:
    line = Text()
    for state in cells:
        line.append(" " if state is None else getattr(shapes, state), style=state or "")
    return line


def _bars(batch: list[int | None], shapes: Glyphs) -> Text:
    largest = max((size for size in batch if size is not None), default=0)
    top = len(shapes.bars)
    line = Text(style="quiet")
    for size in batch:
        line.append(shapes.bars[-(-size * top // largest) - 1] if size else " ")
    return line


def _changes(batch: list[int | None]) -> Text:
    """The batch size, written where it changes, or as soon after it as there is room."""
    characters = [" "] * len(batch)
    written: int | None = None
    free_from = 0
    for column, size in enumerate(batch):
        if size in {None, written} or column < free_from:
            continue
        digits = str(size)
        stop = column + len(digits)
        if batch[column:stop] == [size] * len(digits):
            characters[column:stop] = digits
            written, free_from = size, stop + 1
    return Text("".join(characters))


def _axis(scale: Scale, width: int) -> Text:
    """Round step numbers, each where its step begins."""
    last = scale.first + scale.num_steps - 1
    room = len(str(last)) + 3  # columns a label takes, with the space after it
    distance = _round_up(-(-room * scale.steps_per_column // scale.columns_per_step))
    ticks = [scale.first, *range(-(-scale.first // distance) * distance, last + 1, distance)]
    characters = [" "] * width
    free_from = 0
    for step in ticks:
        column = scale.column(step)
        if column >= free_from and column + len(str(step)) <= width:
            characters[column : column + len(str(step))] = str(step)
            free_from = column + len(str(step)) + 1
    return Text("".join(characters).rstrip(), "quiet")


def _round_up(number: int) -> int:
    """The next number of 1, 2, 5, 10, 20, 50 ..."""
    power = 1
    while True:
        for digit in _NICE:
            if digit * power >= number:
                return digit * power
        power *= 10


def _labelled(label: str, margin: int, line: Text) -> Text:
    start = Text(label, style="label")
    start.pad_right(margin - start.cell_len)
    return Text.assemble(start, line)
