"""A bar on stderr while a long trace is read.

If stderr is not a terminal, nothing is shown.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from nvtrace_cli.views.console import is_terminal, make_console

if TYPE_CHECKING:
    from collections.abc import Iterator

_SMALL_BYTES = 8 * 2**20  # read before a bar is drawn
_STRIDE_BYTES = 2**20


class Bar:
    """How far a trace is read. Call it with the number of bytes read so far.

    Args:
        progress: rich's bar; None draws nothing.
        num_bytes: the size of the file.
    """

    def __init__(self, progress: Progress | None = None, num_bytes: int = 0) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task("", total=num_bytes)
        self._shown = 0

    def __call__(self, num_read: int) -> None:
        """Redraw the bar if it has moved."""
        if self._progress is None or self._task is None or num_read - self._shown < _STRIDE_BYTES:
            return
        self._shown = num_read
        self._progress.update(self._task, completed=num_read)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Hide the bar while something is printed."""
        if self._progress is None:
            yield
            return
        self._progress.stop()
        yield
        self._progress.start()


@contextmanager
def reading_bar(source: str, *, prints_meanwhile: bool = False) -> Iterator[Bar]:
    """Show how far a file is read; the bar disappears at the end.

    Args:
        source: path of the trace. Standard input and pipes have no known size, and no bar.
        prints_meanwhile: data is printed all the time; on a terminal, no bar is needed then.
    """
    path = Path(source)
    num_bytes = path.stat().st_size if path.is_file() else 0
    is_known = num_bytes >= _SMALL_BYTES
    is_busy = prints_meanwhile and is_terminal()
    if not is_known or is_busy or not is_terminal(stderr=True):
        yield Bar()
        return
    columns = (BarColumn(bar_width=40), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(
        *columns,
        console=make_console(stderr=True),
        transient=True,
        redirect_stdout=False,  # the data on the terminal shows the progress
    ) as progress:
        yield Bar(progress, num_bytes)
