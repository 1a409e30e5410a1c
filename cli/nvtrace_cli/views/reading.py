"""A bar on stderr while a long trace is read.

Knows terminals and how large a file is. Does not know what is read. Where stderr is no terminal,
nothing is shown.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from nvtrace_cli.views.console import is_terminal, make_console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SMALL_BYTES = 8 * 2**20  # read before a bar is drawn
_STRIDE_BYTES = 2**20


@contextmanager
def reading_bar(source: str) -> Iterator[Callable[[int], None]]:
    """Show how far a file is read; the bar is gone in the end.

    Args:
        source: path of the trace. Of a compressed one, or stdin, nobody knows how far it is.

    Yields:
        What takes the number of bytes read so far.
    """
    path = Path(source)
    num_bytes = path.stat().st_size if path.is_file() else 0
    if num_bytes < _SMALL_BYTES or path.suffix in {".gz", ".zst"} or not is_terminal(stderr=True):
        yield _ignore
        return
    columns = (BarColumn(bar_width=40), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=make_console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=num_bytes)
        shown = 0

        def watch(num_read: int) -> None:
            nonlocal shown
            if num_read - shown >= _STRIDE_BYTES:
                shown = num_read
                progress.update(task, completed=num_read)

        yield watch


def _ignore(_num_read: int) -> None:
    pass
