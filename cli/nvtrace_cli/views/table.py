"""Tables that fit the width: if there is no room, whole columns are left out.

A cut number would be a wrong number. So a column gets all the width that it needs, or is left out;
only a column of prose takes the remaining width, and wraps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.measure import Measurement, measure_renderables
from rich.table import Table
from rich.text import Text

from nvtrace_cli.views.prose import Prose

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from nvtrace.catalog import Catalog

_LEAST_PROSE = 16  # columns in which a sentence can be read
_UNBOUNDED = 100_000


class FittingTable:
    """A rich renderable that is never wider than the available width.

    Args:
        headings: the name and the heading of each column, from left to right.
        leaving: names of columns, in the order in which they are left out. After them, all others
            are, from the last one on; the first column always stays.
        catalog: the words, to say which columns are not shown.
        words: names of columns with words, which are aligned to the left.
        prose: the name of the column that wraps.
        is_continued: columns that do not fit are in another table below, beside the first one.
        gap: spaces between columns.
        title: above it.
        caption: below it.
    """

    def __init__(
        self,
        headings: Mapping[str, str],
        catalog: Catalog,
        *,
        leaving: Sequence[str] = (),
        words: Collection[str] = (),
        prose: str = "",
        is_continued: bool = False,
        gap: int = 2,
        title: str = "",
        caption: str = "",
    ) -> None:
        self._headings = headings
        self._catalog = catalog
        self._leaving = [*leaving, *(n for n in reversed([*headings][1:]) if n not in leaving)]
        self._words = words
        self._prose = prose
        self._is_continued = is_continued
        self._gap = gap
        self._title = title
        self._caption = caption
        self._rows: list[tuple[tuple[RenderableType, ...], str]] = []

    @property
    def row_count(self) -> int:
        """Rows so far."""
        return len(self._rows)

    def add_row(self, *cells: RenderableType, style: str = "") -> None:
        """A row: a cell for every column, whether it will be shown or not."""
        self._rows.append((cells, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the columns that fit, and name the others."""
        first, *others = self._headings
        widths = self._widths(console, options)
        shown = self._shown([first, *others], widths, options.max_width)
        yield self._table(shown)
        while self._is_continued and len(shown) > 1 and {*others} - {*shown}:
            others = [name for name in others if name not in shown]
            shown = self._shown([first, *others], widths, options.max_width)
            yield Text()
            yield self._table(shown)
        gone = [self._headings[name].strip() for name in others if name not in shown]
        if gone:
            columns = ", ".join(dict.fromkeys(gone))
            left_out = self._catalog.ui("columns_left_out", columns=columns)
            yield Prose((left_out, "quiet"))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As the table that is drawn."""
        widths = self._widths(console, options)
        shown = self._shown([*self._headings], widths, options.max_width)
        return Measurement.get(console, options, self._table(shown))

    def _shown(self, names: list[str], widths: dict[str, int], room: int) -> list[str]:
        """The columns that fit."""
        shown = [*names]
        for name in self._leaving:
            between = (len(shown) - 1) * (self._gap + 1)
            if sum(widths[kept] for kept in shown) + between <= room:
                break
            if name in shown:
                shown.remove(name)
        return shown

    def _widths(self, console: Console, options: ConsoleOptions) -> dict[str, int]:
        """The width that each column needs."""
        free = options.update(max_width=_UNBOUNDED)
        widths = {}
        for index, (name, heading) in enumerate(self._headings.items()):
            cells = [Text(heading), *(cells[index] for cells, _ in self._rows)]
            needs = measure_renderables(console, free, cells)
            widths[name] = needs.maximum
            if name == self._prose:
                widths[name] = min(needs.maximum, max(needs.minimum, _LEAST_PROSE))
        return widths

    def _table(self, shown: list[str]) -> Table:
        """Rich's own."""
        table = Table(
            box=box.SIMPLE_HEAD,
            padding=(0, self._gap, 0, 0),
            show_edge=False,
            pad_edge=False,
            header_style="label",
            title=Text(self._title, style="heading") if self._title else None,
            title_justify="left",
            caption=Text(self._caption, style="quiet") if self._caption else None,
            caption_justify="left",
        )
        for name in shown:
            is_prose = name == self._prose
            table.add_column(
                Text(self._headings[name]),
                justify="left" if is_prose or name in self._words else "right",
                no_wrap=not is_prose,
                ratio=1 if is_prose else None,
            )
        places = [[*self._headings].index(name) for name in shown]
        for cells, style in self._rows:
            table.add_row(*(cells[place] for place in places), style=style)
        return table
