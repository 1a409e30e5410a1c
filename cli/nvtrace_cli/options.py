"""What several commands have in common on the command line.

Knows the option `--lang` and where its default comes from, and the options that a chat template is
filled in with. Imports nothing heavy: every command's
`--help` loads it.
"""

from __future__ import annotations

import json
import os
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from nvtrace_cli.failures import UsageError
from nvtrace_cli.stderr import tell

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvtrace.catalog import Catalog


class Lang(StrEnum):
    """A language that the words can be shown in."""

    EN = "en"
    ZH = "zh"


LangOption = Annotated[
    Lang | None, typer.Option("--lang", help="Language of the output; by default the locale's.")
]

ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        metavar="JSON", help="Values for the chat template, such as '{\"enable_thinking\": false}'."
    ),
]
ThinkingOption = Annotated[
    bool | None,
    typer.Option(
        help="Whether the model thinks first, if its chat template knows enable_thinking."
    ),
]


def template_kwargs(text: str | None, enable_thinking: bool | None) -> dict[str, object]:
    """What a chat template is filled in with, by the two options.

    Raises:
        UsageError: the text is no JSON object, or the two contradict each other.
    """
    given: dict[str, object] = {}
    problem = None
    try:
        match json.loads("{}" if text is None else text):
            case dict() as read:
                given = read
            case read:
                problem = f"that is a {type(read).__name__}"
    except (ValueError, RecursionError) as error:
        problem = str(error)
    if problem is not None:
        raise UsageError(
            f"--chat-template-kwargs {text:.80}: it must be a JSON object ({problem}), "
            """such as --chat-template-kwargs '{"enable_thinking": false}'"""
        )
    if enable_thinking is None:
        return given
    if given.setdefault("enable_thinking", enable_thinking) is not enable_thinking:
        raise UsageError(
            f"--chat-template-kwargs {text}: --enable-thinking or --no-enable-thinking "
            "contradicts it; give only one of the two"
        )
    return given


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
