"""The catalogs (`en.toml`, `zh.toml`): all texts about events, fields and codes, per language.

A test compares the catalogs with the event structs. An event, field or code that is not in a
catalog (from a newer minor version) is shown by its own name.

    [ui]                               messages of the command line, with {placeholders}
    [scenarios.example]                title, story
    [fields]                           the meaning of a field, in any event
    [events.PREEMPT]                   title, meaning, when (its phases)
    [events.PREEMPT.fields]            the meaning of a field in this event only
    [events.PREEMPT.codes.reason]      the meaning of a code of the field `reason`
    [check.invariants]                 an invariant's title, and what it teaches
    [check.facts]                      what a finding compares
    [check.sentences]                  messages of `nvtrace check`
    [reference]                        parts of the pages that `make reference` writes
    [columns.rows]                     what a row of a DataFrame is
    [columns.sources]                  which events a DataFrame is made from
    [columns.meanings]                 a column's meaning: "FRAME.COLUMN", or "COLUMN" for the rest
    [columns.units]                    a unit

`[columns]` is not in `en.toml`: its English texts are in `analysis/columns.py`, and are passed as
arguments.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)


class Catalog:
    """The texts of one language.

    Args:
        language: of the texts.
        words: the parsed catalog file.
    """

    def __init__(self, language: Language, words: dict[str, Any]) -> None:
        self.language = language
        self._ui: dict[str, str] = words["ui"]
        self._fields: dict[str, str] = words["fields"]
        self._events: dict[str, dict[str, Any]] = words["events"]
        self._scenarios: dict[str, dict[str, str]] = words["scenarios"]
        self._check: dict[str, dict[str, Any]] = words["check"]
        self._reference: dict[str, str] = words["reference"]
        self._columns: dict[str, dict[str, str]] = words.get("columns", {})

    def title(self, tag: str) -> str:
        """An event in a few words."""
        return str(self._events.get(tag, {}).get("title", tag))

    def when(self, tag: str) -> str:
        """The phases an event belongs to; empty for the header and the footer."""
        return str(self._events.get(tag, {}).get("when", ""))

    def meaning(self, tag: str) -> str:
        """An event in a few sentences."""
        return str(self._events.get(tag, {}).get("meaning", ""))

    def field(self, tag: str, name: str) -> str:
        """The meaning of an event's field, with its unit."""
        own = self._events.get(tag, {}).get("fields", {})
        return str(own.get(name, self._fields.get(name, "")))

    def codes(self, tag: str, field: str = "reason") -> dict[str, str]:
        """The codes of an event's field -> their meanings."""
        return dict(self._events.get(tag, {}).get("codes", {}).get(field, {}))

    def reason(self, tag: str, code: str) -> str:
        """The meaning of a reason code."""
        return self.codes(tag).get(code, code)

    def scenario(self, name: str) -> tuple[str, str]:
        """A scenario's title and its story in one sentence."""
        words = self._scenarios.get(name, {})
        return str(words.get("title", name)), str(words.get("story", ""))

    def invariant(self, name: str) -> tuple[str, str]:
        """An invariant's title, and what it teaches."""
        title, teaches = self._check["invariants"][name]
        return str(title), str(teaches)

    def fact(self, name: str) -> str:
        """What a finding compares; for an event's own field, its name."""
        return str(self._check["facts"].get(name, name))

    def check(self, key: str, **values: object) -> str:
        """A message of `nvtrace check`, as `ui`."""
        return str(self._check["sentences"][key]).format_map(values)

    def reference(self, key: str, **values: object) -> str:
        """A part of the events page or the columns page, as `ui`."""
        return self._reference[key].format_map(values)

    def row(self, frame: str, english: str) -> str:
        """What a row of a DataFrame is; `english` if there is no translation."""
        return self._columns.get("rows", {}).get(frame, english)

    def source(self, frame: str, english: str) -> str:
        """Which events a DataFrame is made from; `english` if there is no translation."""
        return self._columns.get("sources", {}).get(frame, english)

    def column(self, frame: str, column: str, english: str) -> str:
        """The meaning of a column of a DataFrame; `english` if there is no translation."""
        meanings = self._columns.get("meanings", {})
        return meanings.get(f"{frame}.{column}", meanings.get(column, english))

    def unit(self, english: str) -> str:
        """A column's unit; `english` if there is no translation, "" for no unit."""
        return self._columns.get("units", {}).get(english, english)

    def ui(self, key: str, **values: object) -> str:
        """A message of the command line.

        Args:
            key: its name under [ui].
            **values: for its {placeholders}.

        Raises:
            KeyError: there is no such message, or a placeholder has no value.
        """
        return self._ui[key].format_map(values)

    def ui_or(self, key: str, otherwise: str, **values: object) -> str:
        """The message `key`, or `otherwise` if the key is made of a code that has no message."""
        return self.ui(key if key in self._ui else otherwise, **values)


def load_catalog(language: Language) -> Catalog:
    """Read the catalog of one language.

    Raises:
        ValueError: there is no catalog for this language.
    """
    if language not in LANGUAGES:
        raise ValueError(f"no words in {language!r}: the languages are {', '.join(LANGUAGES)}")
    file = Path(__file__).with_name(f"{language}.toml")
    return _read(language, file, file.stat().st_mtime_ns)


@cache
def _read(language: Language, file: Path, _changed: int) -> Catalog:
    """Read once, until the file changes: `make reference` adds words to it."""
    return Catalog(language, tomllib.loads(file.read_text("utf-8")))
