"""The findings of `nvtrace.check`, printed as they are found."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table

from nvtrace.check import INVARIANTS, Checker
from nvtrace_cli.views.console import make_console
from nvtrace_cli.views.machine import fit_for_stdout
from nvtrace_cli.views.prose import Prose
from nvtrace_cli.views.text import count, escape, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from nvtrace.catalog import Catalog
    from nvtrace.check import Fact, Finding
    from nvtrace.envelope import Record
    from nvtrace_cli.views.reading import Bar

_MOST = 10  # shown unless all are asked for
_VALUE_WIDTH = 60
_COLUMNS = ("step", "event_id", "event", "invariant", "told", "value", "known", "value")


def show(records: Iterable[Record], catalog: Catalog, bar: Bar, *, is_all: bool) -> int:
    """Show findings as they are found, each with its explanation. Returns their number.

    Args:
        records: of a trace.
        catalog: the words.
        bar: hidden while a finding is printed.
        is_all: show all, not only the first few.
    """
    console, checker = make_console(), Checker()
    counts: Counter[str] = Counter()
    num_shown = 0
    for record in records:
        for finding in checker.take(record):
            if is_all or num_shown < _MOST:
                with bar.aside():
                    _show_one(console, finding, catalog, is_first=finding.invariant not in counts)
                num_shown += 1
            counts[finding.invariant] += 1
    with bar.aside():
        _conclude(console, checker, counts, num_shown, catalog)
    return checker.num_findings


def _conclude(
    console: Console, checker: Checker, counts: Counter[str], num_shown: int, catalog: Catalog
) -> None:
    events, findings = count(checker.num_events), checker.num_findings
    if not findings:
        number = count(len(INVARIANTS))
        console.print(Prose((catalog.check("clean", events=events, invariants=number), "")))
        return
    if findings > num_shown:
        more = count(findings - num_shown)
        console.print(Prose((catalog.check("more", count=more), "quiet")), "", sep="\n")
    found = catalog.check("found", findings=count(findings), events=events)
    console.print(Prose((found, "error")))
    console.print(_table(counts, catalog))


def print_plain(records: Iterable[Record]) -> int:
    """One finding a line, with tabs. Returns how many there are."""
    checker = Checker()
    sys.stdout.write("\t".join(_COLUMNS) + "\n")
    for record in records:
        for finding in checker.take(record):
            step = "-" if finding.step is None else str(finding.step)
            told, known = finding.recorded, finding.expected
            facts = (told.name, _json(told.value), known.name, _json(known.value))
            place = (step, str(finding.event_id), finding.event, finding.invariant)
            sys.stdout.write("\t".join((*place, *map(escape, facts))) + "\n")
    return checker.num_findings


def print_json(records: Iterable[Record], catalog: Catalog) -> int:
    """One JSON object a finding. Returns how many there are."""
    checker = Checker()
    for record in records:
        for finding in checker.take(record):
            line = fit_for_stdout(_json(finding_object(finding, catalog)))
            sys.stdout.write(line + "\n")
    return checker.num_findings


def finding_object(finding: Finding, catalog: Catalog) -> dict[str, Any]:
    """A finding, for JSON."""
    title, teaches = catalog.invariant(finding.invariant)
    return {
        "invariant": finding.invariant,
        "step": finding.step,
        "event_id": finding.event_id,
        "event": finding.event,
        "facts": [
            {"fact": fact.name, "words": catalog.fact(fact.name), "value": fact.value}
            for fact in (finding.recorded, finding.expected)
        ],
        "title": title,
        "teaches": teaches,
    }


def line(finding: Finding, catalog: Catalog) -> str:
    """A finding in one line, for a run under way."""
    return catalog.check(
        "live",
        place=_place(finding, catalog),
        event=finding.event,
        title=catalog.invariant(finding.invariant)[0],
        clash=_clash(finding, catalog),
    )


def _show_one(console: Console, finding: Finding, catalog: Catalog, *, is_first: bool) -> None:
    title, teaches = catalog.invariant(finding.invariant)
    place = catalog.check("heading", place=_place(finding, catalog), event=finding.event)
    console.print(Prose((title, "error"), label=place))
    console.print(Padding(Prose((_clash(finding, catalog), "")), (0, 0, 0, 4)))
    if is_first:
        console.print(Padding(Prose((teaches, "quiet")), (0, 0, 0, 4)))
    console.print()


def _table(counts: Counter[str], catalog: Catalog) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(catalog.check("column_count"), justify="right", no_wrap=True)
    table.add_column(catalog.check("column_invariant"))
    for name in sorted(counts, key=INVARIANTS.index):
        table.add_row(count(counts[name]), Prose((catalog.invariant(name)[0], "")))
    return table


def _place(finding: Finding, catalog: Catalog) -> str:
    if finding.step is None:
        return catalog.check("place_outside", event_id=finding.event_id)
    return catalog.check("place", step=finding.step, event_id=finding.event_id)


def _clash(finding: Finding, catalog: Catalog) -> str:
    told, known = finding.recorded, finding.expected
    return catalog.check(
        "clash",
        told=catalog.fact(told.name),
        told_value=_value(told),
        known=catalog.fact(known.name),
        known_value=_value(known),
    )


def _value(fact: Fact) -> str:
    value = fact.value if isinstance(fact.value, str) else _json(fact.value)
    return shorten(escape(value), _VALUE_WIDTH)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
