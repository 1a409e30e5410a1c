"""Numbers, units, and text from a trace, ready to print.

All text from a trace (the model's name, generated text) goes through `escape`, so that no trace can
move the cursor, change colours or break a line.
"""

from __future__ import annotations

import json
import unicodedata

from rich.cells import cell_len

_NS_PER_S = 1_000_000_000
_JOINERS = "\u200c\u200d"  # parts of many emoji and of some scripts
_OF_NUMBERS = "0123456789.,"
_HIDDEN_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, formats, surrogates, separators


def escape(text: str) -> str:
    r"""`text` on one line, control characters as \n, \x1b, \u202e."""
    return "".join(_escape_character(character) for character in text)


def escape_json(line: str) -> str:
    r"""JSON on one line, as it is, but control characters (in its strings) as \\u202e."""
    return line if line.isascii() else "".join(map(_escape_in_json, line))


def _escape_in_json(character: str) -> str:
    is_shown = _escape_character(character) == character
    return character if is_shown else json.dumps(character)[1:-1]


def _escape_character(character: str) -> str:
    if character in _JOINERS or unicodedata.category(character) not in _HIDDEN_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode("ascii")


def shorten(text: str, width: int, ellipsis: str = "...") -> str:
    """`text`, cut to at most `width` columns; a number that does not fit is left out whole."""
    if cell_len(text) <= width:
        return text
    room = max(width - len(ellipsis), 0)
    length = 0
    for character in text:
        room -= cell_len(character)
        if room < 0:
            break
        length += 1
    if text[length] in _OF_NUMBERS:
        length = len(text[:length].rstrip(_OF_NUMBERS))
    return text[:length] + ellipsis[:width]


def flow(parts: list[str], separator: str, width: int) -> str:
    """Join parts into lines of at most `width` columns; no line breaks within a part."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]} {separator} {part}" if lines[-1] else part
        if lines[-1] and cell_len(longer) > width:
            lines.append(part)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def duration(nanoseconds: float) -> str:
    """Three digits and a unit: "850 us", "3.02 ms", "12.3 s", "2 min 5 s"."""
    for limit, unit, size in ((1e6, "us", 1e3), (1e9, "ms", 1e6), (60e9, "s", 1e9)):
        if nanoseconds < limit * 0.9995:  # 999.7 us is rounded to 1 ms
            return f"{_three_digits(nanoseconds / size)} {unit}"
    minutes, seconds = divmod(round(nanoseconds / _NS_PER_S), 60)
    return f"{minutes} min {seconds} s"


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0  # noqa: PLR2004 - digits, rounded
    return f"{value:.{decimals}f}"


def size(num_bytes: int) -> str:
    """Bytes in the largest unit that leaves a whole digit: "512 B", "1.75 MiB", "23.5 GiB"."""
    value = float(num_bytes)
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":  # noqa: PLR2004 - KiB in a MiB
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value == int(value) else f"{_three_digits(value)} {unit}"


def count(number: int) -> str:
    """A whole number, in groups of three: "299,520"."""
    return f"{number:,}"


def parameters(number: int) -> str:
    """A model's size: "596 M", "4.92 M", "30.5 B"."""
    for size_, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size_:
            return f"{_three_digits(number / size_)} {unit}"
    return str(number)


def ids(numbers: tuple[int, ...] | list[int], limit: int = 6) -> str:
    """Sequence numbers: "0, 1, 2", runs as "0-7", the rest of a long list as "...".

    Args:
        numbers: in any order; runs of three or more that ascend by one are drawn together.
        limit: parts shown at most.
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)  # noqa: PLR2004 - as said above
    return ", ".join([*parts[:limit], "..."] if len(parts) > limit else parts)
