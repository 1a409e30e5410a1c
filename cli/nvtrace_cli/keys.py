r"""Keys: the bytes that a terminal sends -> the names of the keys that were pressed.

    b"j"        -> "j"            b"\x1b[A"   -> "up"
    b"\r"       -> "enter"        b"\x1b[5~"  -> "pageup"

`terminal.py` reads the bytes, `browse_model.py` handles the keys.
"""

from __future__ import annotations

import codecs
import re

_SEQUENCES = {
    "A": "up",
    "B": "down",
    "C": "right",
    "D": "left",
    "H": "home",
    "F": "end",
    "1~": "home",
    "7~": "home",
    "4~": "end",
    "8~": "end",
    "5~": "pageup",
    "6~": "pagedown",
}
_CONTROLS = {
    "\r": "enter",
    "\n": "enter",
    "\t": "tab",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x0c": "redraw",
    "\x15": "clear",
}
_ESCAPE = "\x1b"
# CSI (ESC [) with parameters, or SS3 (ESC O), and the letter that ends it.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?<=>]*[ -/]*[@-~]|O[@-~])")
_BEGINNING = re.compile(r"\x1b(?:\[[0-9;?<=>]*[ -/]*|O)?$")


class KeyDecoder:
    """Decodes bytes as they arrive; those of one key may arrive in parts."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("ignore")
        self._rest = ""

    @property
    def is_waiting(self) -> bool:
        """Are there bytes that may be the beginning of another key?"""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        """The keys that are complete with `data`. Unknown sequences are skipped."""
        text = self._rest + self._utf8.decode(data)
        keys: list[str] = []
        place = 0
        while place < len(text):
            if text[place] != _ESCAPE:
                keys += _key(text[place])
                place += 1
            elif match := _SEQUENCE.match(text, place):
                keys += _sequence(match[0])
                place = match.end()
            elif _BEGINNING.match(text, place):
                break
            else:  # Alt and a key, or an unknown sequence: skip the escape
                place += 1
        self._rest = text[place:]
        return keys

    def flush(self) -> list[str]:
        """No more bytes arrived: a lone escape byte was the Escape key."""
        keys = ["escape"] if self._rest else []
        self._rest = ""
        return keys


def _key(character: str) -> list[str]:
    name = _CONTROLS.get(character, character)
    return [name] if len(name) > 1 or name.isprintable() else []


def _sequence(text: str) -> list[str]:
    body = text[2:]
    if len(body) > 2 and body[-1] in "ABCDHF":  # noqa: PLR2004 - with Shift or Ctrl: "1;5C"
        body = body[-1]
    name = _SEQUENCES.get(body)
    return [] if name is None else [name]
