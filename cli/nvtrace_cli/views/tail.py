"""A growing log: the lines of `nvtrace replay --view log`, as they are written.

`log.py` makes the lines.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from nvtrace.envelope import Footer, Header
from nvtrace_cli.views.console import make_console
from nvtrace_cli.views.log import log_lines
from nvtrace_cli.views.machine import record_line
from nvtrace_cli.views.replay import print_line, print_log

if TYPE_CHECKING:
    from nvtrace.catalog import Catalog
    from nvtrace.envelope import Record
    from nvtrace.query import Selection


class Log:
    """Shows records one by one.

    Args:
        selection: what to show.
        catalog: the words.
        as_json: each as in the trace.
    """

    def __init__(self, selection: Selection, catalog: Catalog, *, as_json: bool) -> None:
        self._selection = selection
        self._catalog = catalog
        self._as_json = as_json
        self._console = make_console()

    def show(self, record: Record) -> None:
        """Show a record, if it is selected."""
        if isinstance(record, Header | Footer):
            if self._as_json and self._selection.is_everything:
                print_line(record_line(record))
        elif not self._selection.picks_event(record):
            pass
        elif self._as_json:
            print_line(record_line(record))
        else:
            print_log(log_lines(record, self._catalog), self._console)

    def flush(self) -> None:
        """Nothing is new: flush, so that a reader of a pipe gets what was shown."""
        sys.stdout.flush()
