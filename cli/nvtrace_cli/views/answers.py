"""A run's answers, and the list of scenarios."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.text import Text

from nvtrace_cli.views.console import make_console
from nvtrace_cli.views.machine import json_line
from nvtrace_cli.views.prose import Prose
from nvtrace_cli.views.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console, RenderableType

    from nvtrace.catalog import Catalog
    from nvtrace.scenarios import Answer


def print_answers(answers: Sequence[Answer], catalog: Catalog, *, is_quiet: bool) -> None:
    """Every answer, on stdout.

    Args:
        answers: in the order of the requests.
        catalog: the words.
        is_quiet: the texts only, without the prompts.
    """
    console = make_console()
    for index, answer in enumerate(answers):
        if not is_quiet:
            console.print(_heading(answer, catalog), soft_wrap=True)
        text = answer.output["text"] or answer.output["error"] or ""
        console.print(*(_lines(text, console)), sep="\n", soft_wrap=True)
        if not is_quiet and answer.output["reason"] == "max_tokens":
            cut = catalog.ui("answer_cut", num_tokens=len(answer.output["token_ids"]))
            make_console(stderr=True).print(Text(cut, style="quiet"))
        if not is_quiet and index + 1 < len(answers):
            console.print()


def _heading(answer: Answer, catalog: Catalog) -> Text:
    output = answer.output
    facts = catalog.ui(
        "answer_facts",
        num_prompt=output["num_prompt_tokens"],
        num_completion=len(output["token_ids"]),
        reason=output["reason"],
    )
    seq_id = output["seq_id"]
    who = catalog.ui("seq", ids="-" if seq_id is None else seq_id)
    return Text.assemble(
        (who, "label"), "  ", (escape(answer.message), "heading"), "  ", (facts, "quiet")
    )


def _lines(text: str, console: Console) -> list[RenderableType]:
    """The lines of an answer: wrapped between words on a terminal, else unchanged."""
    lines = escape_lines(text).split("\n")
    if console.is_terminal:
        return [Prose((line, "")) for line in lines]
    return [Text(line) for line in lines]


def escape_lines(text: str) -> str:
    """`text` with its own line breaks, all other control characters escaped."""
    return "\n".join(map(escape, text.split("\n")))


def answers_object(name: str, trace: str, answers: Iterable[Answer]) -> dict[str, Any]:
    """A run's answers, for JSON."""
    outputs = [{"message": answer.message, **answer.output} for answer in answers]
    return {"scenario": name, "trace": trace, "outputs": outputs}


def print_json(value: object) -> None:
    """One JSON value on one line, on stdout."""
    sys.stdout.write(json_line(value) + "\n")


def scenario_objects(names: Iterable[str], catalog: Catalog) -> list[dict[str, str]]:
    """The scenarios, for JSON."""
    stories = [(name, *catalog.scenario(name)) for name in names]
    return [dict(zip(("name", "title", "story"), story, strict=True)) for story in stories]


def print_scenarios(names: Iterable[str], catalog: Catalog) -> None:
    """The scenarios, each with its description."""
    console = make_console()
    for name in names:
        title, story = catalog.scenario(name)
        console.print(Text.assemble((name, "heading"), "  ", title))
        console.print(Padding(Prose((story, "quiet")), (0, 0, 0, 2)))
