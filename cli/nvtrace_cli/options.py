"""What several commands have in common on the command line.

Knows the option `--lang` and where its default comes from. Imports nothing heavy: every command's
`--help` loads it.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from nvtrace_cli.stderr import tell

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvtrace.catalog import Catalog


class Lang(StrEnum):
    """A language that the words can be shown in."""

    EN = "en"
    ZH = "zh"


LangOption = Annotated[
    Lang | None, typer.Option("--lang", help="Language of the words; by default the locale's.")
]


def locale_language(environment: Mapping[str, str]) -> Lang:
    """The language that the environment asks for, by the usual order of its variables."""
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        if environment.get(name):
            return Lang.ZH if environment[name].lower().startswith("zh") else Lang.EN
    return Lang.EN


def words(lang: Lang | None) -> Catalog:
    """The catalog of the chosen language, or of the locale's."""
    from nvtrace.catalog import load_catalog  # noqa: PLC0415 - --help needs no words

    return load_catalog((lang or locale_language(os.environ)).value)


def say(message: str) -> None:
    """A message for the person at the terminal: one line on stderr, escaped; see `tell`."""
    tell(f"nvtrace: {message}")
