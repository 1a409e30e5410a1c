"""Options that several commands share: language, chat template, steps, requests, events.

Imports nothing heavy: every command's `--help` loads it.
"""

from __future__ import annotations

import fnmatch
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
    from nvtrace.query import Selection


class Lang(StrEnum):
    """A language of the output."""

    EN = "en"
    ZH = "zh"


def complete_scenarios(incomplete: str) -> list[str]:
    """The scenarios that a shell can complete to."""
    from nvtrace.scenarios import SCENARIOS  # noqa: PLC0415 - for completion only

    return [name for name in SCENARIOS if name.startswith(incomplete)]


def complete_events(incomplete: str) -> list[str]:
    """The same of events, in the case that was begun."""
    from nvtrace.events import EVENT_TYPES  # noqa: PLC0415 - for completion only

    is_lower = incomplete.islower()
    names = [name.lower() if is_lower else name for name in EVENT_TYPES]
    return [name for name in names if name.startswith(incomplete)]


def complete_policies(incomplete: str) -> list[str]:
    """The same of scheduling policies."""
    from nanovllm.engine.policies import POLICIES  # noqa: PLC0415 - for completion only

    return [name for name in POLICIES if name.startswith(incomplete)]


def complete_devices(incomplete: str) -> list[str]:
    """The same of devices."""
    return [name for name in ("auto", "cpu", "cuda") if name.startswith(incomplete)]


def complete_changes(incomplete: str) -> list[str]:
    """The same of `nvtrace whatif`'s NAME=VALUE: settings, then policies."""
    from nvtrace.whatif.settings import NAMES  # noqa: PLC0415 - for completion only

    before, comma, part = incomplete.rpartition(",")
    if part.startswith("policy="):
        words = [f"policy={name}" for name in complete_policies(part.removeprefix("policy="))]
    else:
        words = [f"{name}=" for name in NAMES if name.startswith(part)]
    return [before + comma + word for word in words]


ScenarioArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="The scenario; --list shows them all.",
        autocompletion=complete_scenarios,
    ),
]

DeviceOption = Annotated[
    str,
    typer.Option(
        help="cpu, cuda, or auto: a GPU if there is one.", autocompletion=complete_devices
    ),
]

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
    """The variables of a chat template, from the two options.

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


def selection(
    steps: str | None = None, seq_ids: list[int] | None = None, event_glob: str | None = None
) -> Selection:
    """What `--steps`, `--seq` and `--event` ask for.

    Raises:
        UsageError: not a range, or a pattern that matches no event.
    """
    from nvtrace.events import EVENT_TYPES  # noqa: PLC0415 - --help needs no msgspec
    from nvtrace.query import Selection  # noqa: PLC0415 - the same

    first, last = (None, None) if steps is None else _step_range(steps)
    pattern = None if event_glob is None else event_glob.upper()
    if pattern is not None and not fnmatch.filter(EVENT_TYPES, pattern):
        raise UsageError(
            f"--event {event_glob}: no event has such a name; `nvtrace events` lists them all"
        )
    return Selection(first, last, frozenset(seq_ids or ()) or None, pattern)


def _step_range(text: str) -> tuple[int | None, int | None]:
    first, dots, last = text.partition("..")
    try:
        bounds = (int(first) if first else None, int(last) if last else None)
    except ValueError:
        bounds = (None, None)
    if not dots:
        bounds = (bounds[0], bounds[0])
    if bounds == (None, None):
        raise UsageError(f"--steps {text}: write 17, 100..150, 100.. or ..150")
    if bounds[0] is not None and bounds[1] is not None and bounds[0] > bounds[1]:
        raise UsageError(f"--steps {text}: the first step comes after the last")
    return bounds


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
    """Print a message on stderr, as one escaped line; see `tell`."""
    tell(f"nvtrace: {message}")


def warn(message: str) -> None:
    """Print a warning on stderr."""
    say(f"warning: {message}")
