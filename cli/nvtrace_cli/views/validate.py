"""The faults in the lines of a trace (`nvtrace.validate`), printed as they are found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvtrace.export import json_text
from nvtrace.validate import Validator, validate
from nvtrace_cli.views.console import make_console
from nvtrace_cli.views.prose import Prose
from nvtrace_cli.views.replay import print_line
from nvtrace_cli.views.text import count, escape

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvtrace.catalog import Catalog
    from nvtrace.validate import Fault

_MOST = 20  # shown unless all are asked for


@dataclass(frozen=True, slots=True)
class Faults:
    """Shows the faults of one trace.

    Attributes:
        source: path of the trace, "-" for stdin.
        catalog: the words.
        warn: takes a sentence about an incomplete trace.
    """

    source: str
    catalog: Catalog
    warn: Callable[[str], None]

    def show(self, *, is_all: bool) -> int:
        """Show faults as they are found, then the sum. Returns how many there are."""
        console, validator = make_console(), Validator()
        num_faults = 0
        for fault in validate(self.source, validator, warn=self.warn):
            num_faults += 1
            if is_all or num_faults <= _MOST:
                line = self.catalog.ui("validate_line", number=fault.line)
                console.print(Prose((self._words(fault), ""), label=line))
        lines = count(validator.num_lines)
        if not num_faults:
            console.print(Prose((self.catalog.ui("validate_clean", lines=lines), "")))
            return 0
        if num_faults > _MOST and not is_all:
            more = self.catalog.ui("validate_more", number=count(num_faults - _MOST))
            console.print(Prose((more, "quiet")))
        found = self.catalog.ui("validate_found", faults=count(num_faults), lines=lines)
        console.print(Prose((found, "error")))
        return num_faults

    def print_plain(self) -> int:
        """One fault a line, with tabs. Returns how many there are."""
        num_faults = 0
        print_line("line\tfault\twords")
        for fault in validate(self.source, Validator(), warn=self.warn):
            num_faults += 1
            print_line(f"{fault.line}\t{fault.code}\t{self._words(fault)}")
        return num_faults

    def print_json(self) -> int:
        """One JSON object a fault. Returns how many there are."""
        num_faults = 0
        for fault in validate(self.source, Validator(), warn=self.warn):
            num_faults += 1
            told = {"line": fault.line, "fault": fault.code, "facts": fault.facts}
            print_line(json_text({**told, "words": self._words(fault)}))
        return num_faults

    def _words(self, fault: Fault) -> str:
        return escape(self.catalog.ui(f"validate_{fault.code}", **fault.facts))
