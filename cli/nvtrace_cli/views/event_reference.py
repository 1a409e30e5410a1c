"""The reference of events on the terminal. The descriptions come from `nvtrace.reference`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nvtrace.source import calls_of, definition_of
from nvtrace_cli.views.console import make_console
from nvtrace_cli.views.prose import Prose, wrap
from nvtrace_cli.views.table import FittingTable

_WHEN_WIDTH = 15

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from nvtrace.catalog import Catalog
    from nvtrace.reference import EventReference


def print_json(references: EventReference | Sequence[EventReference]) -> None:
    """Descriptions as JSON."""
    text = msgspec.json.format(msgspec.json.encode(references), indent=2).decode()
    make_console().print(Text(text), soft_wrap=True)


def show_list(references: Sequence[EventReference], catalog: Catalog) -> None:
    """All events, a line each."""
    names = ("name", "title", "when")
    table = FittingTable(
        {name: catalog.ui(f"events_column_{name}") for name in names},
        catalog,
        words=names,
        prose="title",
    )
    for reference in references:
        when = "\n".join(wrap(reference.when, _WHEN_WIDTH))
        table.add_row(
            Text(reference.tag, "heading"), Prose((reference.title, "")), Text(when, "quiet")
        )
    console = make_console()
    console.print(table)
    console.print()
    console.print(Text(catalog.ui("events_title", count=len(references)), style="quiet"))


def show_one(reference: EventReference, catalog: Catalog) -> None:
    """One event: meaning, fields, codes, source."""
    console = make_console()
    head = Text(reference.tag, style="heading")
    head.append(f"  {reference.title}")
    if reference.when:
        head.append(f"  [{reference.when}]", style="quiet")
    console.print(head)
    console.print()
    console.print(Prose((reference.meaning, "")))
    if reference.fields:
        console.print()
        console.print(_fields(reference, catalog))
    console.print()
    _print_codes(reference, catalog, console)
    _print_source(reference, catalog, console)


def _fields(reference: EventReference, catalog: Catalog) -> FittingTable:
    names = ("field", "type", "meaning")
    table = FittingTable(
        {name: catalog.ui(f"events_{name}") for name in names},
        catalog,
        leaving=("type",),
        words=names,
        prose="meaning",
    )
    for field in reference.fields:
        # The codes have a list of their own below.
        type_ = catalog.ui("events_code") if field.codes else field.type
        table.add_row(Text(field.name), Text(type_, "quiet"), Prose((field.meaning, "")))
    return table


def _print_codes(reference: EventReference, catalog: Catalog, console: Console) -> None:
    for field in reference.fields:
        if not field.codes:
            continue
        console.print(Text(catalog.ui("events_codes", field=field.name), style="label"))
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column()
        for code, words in field.codes.items():
            grid.add_row(Text(code), Prose((words, "")))
        console.print(Padding(grid, (0, 0, 1, 2)))


def _print_source(reference: EventReference, catalog: Catalog, console: Console) -> None:
    console.print(Text(catalog.ui("events_source"), style="label"))
    if reference.hook is None:
        console.print(Padding(Text(catalog.ui("events_no_hook")), (0, 0, 0, 2)))
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    definition = definition_of(reference.hook)
    if definition is not None:
        name = catalog.ui("events_observer", hook=reference.hook)
        grid.add_row(Text(str(definition)), Text(name, style="quiet"))
    places = calls_of(reference.hook)
    for place in places:
        grid.add_row(Text(str(place)), Text(catalog.ui("events_said"), style="quiet"))
    if not places:
        grid.add_row(Text("-"), Text(catalog.ui("events_not_said"), style="quiet"))
    console.print(Padding(grid, (0, 0, 0, 2)))
