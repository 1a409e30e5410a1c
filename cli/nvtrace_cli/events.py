"""nvtrace events: what an event means, its fields, and where the source emits it.

`views/event_reference.py` draws the description.
"""

from __future__ import annotations

from typing import Annotated

import typer

from nvtrace_cli.failures import UsageError
from nvtrace_cli.options import LangOption, complete_events, words


def events(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="One event; without it, all of them.",
            autocompletion=complete_events,
        ),
    ] = None,
    lang: LangOption = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Look up what the events mean, and where the source code emits them."""
    from nvtrace.reference import RECORD_TYPES, describe  # noqa: PLC0415 - --help needs no structs
    from nvtrace_cli.views import event_reference as view  # noqa: PLC0415 - nor rich

    catalog = words(lang)
    if name is None:
        references = [describe(tag, catalog) for tag in RECORD_TYPES]
        if json:
            view.print_json(references)
        else:
            view.show_list(references, catalog)
        return
    tag = name.upper().replace("-", "_")
    if tag not in RECORD_TYPES:
        raise UsageError(_unknown(name, list(RECORD_TYPES)))
    reference = describe(tag, catalog)
    if json:
        view.print_json(reference)
    else:
        view.show_one(reference, catalog)


def _unknown(name: str, tags: list[str]) -> str:
    from difflib import get_close_matches  # noqa: PLC0415 - for errors only

    word = name.upper().replace("-", "_")
    near = get_close_matches(word, tags, n=3) or [tag for tag in tags if word in tag][:3]
    hint = f"did you mean {', '.join(near)}?" if near else "`nvtrace events` lists them all"
    return f"there is no event {name}: {hint}"
