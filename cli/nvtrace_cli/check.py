"""nvtrace check: does a trace keep the invariants of a correct engine?

`Watch` checks a run while it goes on. The invariants are in `nvtrace.check`; `views/check.py` draws
the findings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nvtrace_cli.failures import UsageError
from nvtrace_cli.options import LangOption, say, warn, words

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvtrace.catalog import Catalog
    from nvtrace.events import AnyEvent, Event

_FOUND = 1
_MOST_LINES = 20  # of a run: later ones are often caused by the first


def check(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="The trace; .gz and .zst are read too, - is stdin."),
    ],
    *,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show every finding, not only the first ten.")
    ] = False,
    lang: LangOption = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per finding.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="One finding a line, with tabs, no colours.")
    ] = False,
) -> None:
    """Check a trace against the engine's invariants, and show which two facts disagree.

    Data goes to stdout, messages to stderr. Exit codes: 0 no findings, 1 findings, 2
    wrong usage, 3 not a readable trace, 4 a trace newer than this nvtrace.
    """
    from nvtrace.caveats import saying_unknown_codes, saying_whose  # noqa: PLC0415 - --help needs no msgspec
    from nvtrace.reader import read_trace  # noqa: PLC0415 - the same
    from nvtrace_cli.views import check as view  # noqa: PLC0415 - nor rich
    from nvtrace_cli.views.reading import reading_bar  # noqa: PLC0415 - the same

    if json and plain:
        raise UsageError("--json and --plain cannot be used together: give one of them")
    catalog = words(lang)
    with reading_bar(file, prints_meanwhile=json or plain) as bar:
        records = saying_whose(read_trace(file, warn=warn, watch=bar), file, warn)
        records = saying_unknown_codes(records, file, warn)
        if json:
            num_findings = view.print_json(records, catalog)
        elif plain:
            num_findings = view.print_plain(records)
        else:
            num_findings = view.show(records, catalog, bar, is_all=show_all)
    if num_findings:
        raise typer.Exit(_FOUND)


CheckOption = Annotated[
    bool, typer.Option("--check", help="Check the engine's invariants while it runs.")
]


class Watch:
    """Checks a run while it goes on, and prints a line for each finding.

    Args:
        catalog: the words.
        is_on: is checking switched on?
    """

    def __init__(self, catalog: Catalog, *, is_on: bool) -> None:
        from nvtrace.check import Checker  # noqa: PLC0415 - --help needs no msgspec

        self.catalog = catalog
        self._checker = Checker()
        self._is_on = is_on

    def beside(self, tap: Callable[[list[Event]], None]) -> Callable[[list[Event]], None]:
        """A tap that passes events to `tap`, then checks them; `tap` itself if checking is off."""
        if not self._is_on:
            return tap

        def both(events: list[Event]) -> None:
            tap(events)
            self.take(events)  # type: ignore[arg-type]  # a recorder has no others

        return both

    def take(self, events: list[AnyEvent]) -> None:
        """Check the events of a step, or those between two steps."""
        from nvtrace_cli.views.check import line  # noqa: PLC0415 - --help needs no rich

        for event in events:
            before = self._checker.num_findings
            for number, finding in enumerate(self._checker.take(event), start=before):
                if number < _MOST_LINES:
                    say(line(finding, self.catalog))

    def end(self, trace: str) -> None:
        """After the run: exit with code 1 if there are findings."""
        num_findings = self._checker.num_findings
        if num_findings:
            say(self.catalog.check("live_end", findings=num_findings, trace=trace))
            raise typer.Exit(_FOUND)
