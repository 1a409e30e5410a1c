"""Prose: sentences that wrap well, in English and in Chinese.

rich breaks lines at spaces only, and Chinese has none. Here a line may also break between two wide
characters, but not before a closing mark or after an opening one, nor at a no-break space.

"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.measure import Measurement
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console, ConsoleOptions, RenderResult

NO_BREAK_SPACE = "\u00a0"
_CLOSING = "，。：；！？、）」』》…—,.:;!?)"  # noqa: RUF001 - full-width marks
_OPENING = "（「『《("  # noqa: RUF001 - the same


class Prose:
    """A rich renderable: paragraphs, each with a style.

    Args:
        *paragraphs: (text, style) of each; every one begins on a new line.
        label: before the first one, in the style of labels.
    """

    def __init__(self, *paragraphs: tuple[str, str], label: str = "") -> None:
        (text, style), *others = paragraphs
        self.paragraphs = ((label + text, style), *others)
        self._label = label

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """Wrap to the available width."""
        num_labelled = len(self._label)
        for text, style in self.paragraphs:
            for line in wrap(text, options.max_width):
                shown = Text(line, no_wrap=True, overflow="crop")
                shown.stylize("label", 0, num_labelled)
                shown.stylize(style, num_labelled)
                num_labelled = 0
                yield shown

    def __rich_measure__(self, _console: Console, options: ConsoleOptions) -> Measurement:
        """From the longest piece that cannot be broken to the longest paragraph."""
        texts = [text for text, _ in self.paragraphs]
        units = (cell_len(unit.rstrip(" ")) for text in texts for unit in _units(text))
        smallest = max(units, default=0)
        largest = max(map(cell_len, texts), default=0)
        width = options.max_width
        return Measurement(min(smallest, width), min(largest, width))


def wrap(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` columns; no-break spaces come out as spaces.

    Args:
        text: one paragraph.
        width: at least 1. What is longer in one piece is cut.
    """
    lines = [""]
    for unit in _pieces(_units(text), width):
        if lines[-1] and cell_len(lines[-1] + unit.rstrip(" ")) > width:
            lines.append("")
        lines[-1] += unit
    return [line.rstrip(" ").replace(NO_BREAK_SPACE, " ") for line in lines]


def _units(text: str) -> Iterator[str]:
    """The pieces between which a line may break; spaces stay at the end of theirs."""
    unit = ""
    for character in text:
        if unit and _may_break(unit[-1], character):
            yield unit
            unit = ""
        unit += character
    if unit:
        yield unit


def _may_break(before: str, after: str) -> bool:
    if after == " " or after in _CLOSING or before in _OPENING:
        return False
    return before == " " or _is_wide(before) or _is_wide(after)


def _is_wide(character: str) -> bool:
    return cell_len(character) == 2  # noqa: PLR2004 - columns


def _pieces(units: Iterable[str], width: int) -> Iterator[str]:
    """Cut what is wider than a whole line."""
    for unit in units:
        piece = ""
        for character in unit:
            if piece and character != " " and cell_len(piece + character) > width:
                yield piece
                piece = ""
            piece += character
        yield piece
