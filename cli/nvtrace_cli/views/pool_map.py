"""The pool of KV blocks as a map: one cell per block, or per several blocks if space is short.

       0  ▓▓▓▓▓▓▓▓ 22██████ ░░░░░░░░ ········
      32  ········ ········ ········ ········

`at.py` lists the block tables of the requests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rich.text import Text

from nvtrace.at import block_kinds
from nvtrace_cli.views.prose import NO_BREAK_SPACE, Prose
from nvtrace_cli.views.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from nvtrace.at import BlockKind
    from nvtrace.catalog import Catalog
    from nvtrace.replay import State

_STYLES: dict[BlockKind, str] = {
    "free": "quiet",
    "cached": "waiting",
    "used": "decode",
    "published": "prefill",
    "shared": "mixed",
}
_UNICODE: dict[BlockKind, str] = {"free": "·", "cached": "░", "used": "█", "published": "▓"}
_ASCII: dict[BlockKind, str] = {"free": ".", "cached": "c", "used": "#", "published": "p"}
_LARGEST_DIGIT = 9
_GROUP = 8
_MOST_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Cell:
    kind: BlockKind
    glyph: str


def small_pool_map(state: State, console: Console, num_rows: int) -> tuple[int, list[Text]]:
    """The whole pool in at most so many rows.

    Args:
        state: with the blocks.
        console: where it will be shown.
        num_rows: at least 1.

    Returns:
        How many blocks a cell stands for (it shows the busiest of them), and the rows.
    """
    cells = _cells(state, _glyphs(console))
    label_width, per_row = _shape(state, console)
    per_cell = 1
    while per_row * num_rows * per_cell < len(cells):
        per_cell *= 2
    starts = range(0, len(cells), per_cell)
    merged = [max(cells[start : start + per_cell], key=_how_busy) for start in starts]
    return per_cell, [
        _line(start * per_cell, merged[start : start + per_row], label_width)
        for start in range(0, len(merged), per_row)
    ]


def num_map_rows(state: State, console: Console) -> int:
    """Rows of the pool's map, one cell per block."""
    return -(-state.num_blocks // _shape(state, console)[1])


def _how_busy(cell: _Cell) -> tuple[int, str]:
    """Order of the states: a cell shows shared before used before free blocks."""
    return [*_STYLES].index(cell.kind), cell.glyph


def _shape(state: State, console: Console) -> tuple[int, int]:
    """(columns of a row's label, cells in a row)."""
    label_width = len(count(state.num_blocks)) + 2
    return label_width, _cells_per_row(console.width - label_width - 2)


def pool_map(state: State, catalog: Catalog, console: Console) -> Iterator[Text]:
    """Rows of cells; of many equal rows, only the number is given."""
    cells = _cells(state, _glyphs(console))
    label_width, per_row = _shape(state, console)
    rows = [(start, cells[start : start + per_row]) for start in range(0, len(cells), per_row)]
    lines = []
    for only_cell, group in groupby(rows, key=lambda row: _only_cell(row[1])):
        (start, row), *others = list(group)
        lines.append(_line(start, row, label_width))
        if only_cell is not None and len(others) > 1:
            num_alike = sum(len(row) for _, row in others)
            told = catalog.ui("at_alike", count=count(num_alike))
            lines.append(Text(f"{'...':>{label_width}}  {told}", style="quiet"))
        else:
            lines += [_line(start, row, label_width) for start, row in others]
    yield from lines[:_MOST_ROWS]
    if len(lines) > _MOST_ROWS:
        yield Text(catalog.ui("at_more", count=count(len(lines) - _MOST_ROWS)), style="quiet")


def pool_legend(state: State, catalog: Catalog, console: Console) -> Prose:
    """What each kind of cell means, and how many blocks are of that kind."""
    shapes = _glyphs(console)
    counts = Counter(block_kinds(state))
    parts = []
    for kind in _STYLES:
        name = catalog.ui(f"at_kind_{kind}")
        part = " ".join((shapes.get(kind, "2-9"), name, count(counts[kind])))
        parts.append(part.replace(" ", NO_BREAK_SPACE))  # a line breaks between parts only
    return Prose(("   ".join(parts), "quiet"))


def _glyphs(console: Console) -> dict[BlockKind, str]:
    return _UNICODE if console.encoding.startswith("utf") else _ASCII


def _cells(state: State, shapes: dict[BlockKind, str]) -> list[_Cell]:
    cells = {kind: _Cell(kind, glyph) for kind, glyph in shapes.items()}
    shared = [_Cell("shared", str(number)) for number in range(_LARGEST_DIGIT + 1)]
    more = _Cell("shared", "+")
    return [
        cells[kind] if kind != "shared" else shared[num] if num <= _LARGEST_DIGIT else more
        for kind, num in zip(block_kinds(state), state.ref_counts, strict=True)
    ]


def _only_cell(row: list[_Cell]) -> _Cell | None:
    """The cell, if all cells of a row are equal; else None."""
    return row[0] if all(cell == row[0] for cell in row) else None


def _cells_per_row(width: int) -> int:
    """The largest power of two that fits with a gap after each eight, at least eight."""
    number = _GROUP
    while 2 * number + 2 * number // _GROUP - 1 <= width:
        number *= 2
    return number


def _line(start: int, row: list[_Cell], label_width: int) -> Text:
    line = Text(f"{count(start):>{label_width}}  ", style="", no_wrap=True)
    for place, cell in enumerate(row):
        if place and place % _GROUP == 0:
            line.append(" ")
        line.append(cell.glyph, style=_STYLES[cell.kind])
    line.stylize("label", 0, label_width)
    return line
