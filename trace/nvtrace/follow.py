"""Follow: read a trace while it is still being written.

    nvtrace run ...  --->  trace.jsonl  --->  follow_trace()  ---> records, as they come

Knows that a file grows, that it may not be there yet, and that a run may put another in its place.
Does not know lines or records (`reader.py`): the reader reads a file whose end waits for more.
"""

from __future__ import annotations

import io
import os
import stat
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from typing_extensions import override

from nvtrace.envelope import Footer
from nvtrace.reader import UnreadableTraceError, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nvtrace.envelope import Record


def follow_trace(
    path: Path,
    *,
    pause: Callable[[], object],
    missing: Callable[[], object],
    warn: Callable[[str], None] | None = None,
) -> Iterator[Record]:
    """Read a trace up to its footer, however long that takes.

    Args:
        path: the trace. A compressed one grows about once a second.
        pause: called when there is nothing new; returns when it is time to look again.
        missing: called once if there is no such file yet.
        warn: see `read_trace`.

    Yields:
        What `read_trace` yields. The footer is the last; a run that was killed writes none, and
        then this never ends by itself.

    Raises:
        UnreadableTraceError: not a trace, or the file was removed, replaced or cut meanwhile.
        NewerTraceError: the trace's format is of a newer major version.
    """
    growing = GrowingFile(_wait_for(path, pause, missing), path, pause)
    for record in read_trace(cast("BinaryIO", growing), warn=warn, name=path):
        yield record
        if isinstance(record, Footer):
            return


class GrowingFile(io.RawIOBase):
    """A file without an end: a read waits until there is something.

    Args:
        file: open at its beginning, unbuffered.
        path: where it lies.
        pause: see `follow_trace`.
    """

    def __init__(self, file: io.FileIO, path: Path, pause: Callable[[], object]) -> None:
        self._file = file
        self._path = path
        self._pause = pause

    @override
    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with what there is, at least a byte."""
        while not (num_bytes := self._file.readinto(buffer) or 0):
            self._check()
            self._pause()
        return num_bytes

    @override
    def close(self) -> None:
        """Close the file beneath as well."""
        self._file.close()
        super().close()

    def _check(self) -> None:
        """Is it still the file that lies there, with all that was read from it?"""
        try:
            there = self._path.stat()
        except OSError as error:
            raise UnreadableTraceError(f"{self._path} was removed while it was read") from error
        if not os.path.samestat(there, os.fstat(self._file.fileno())):
            raise UnreadableTraceError(
                f"{self._path} was replaced while it was read: start again to follow the new one"
            )
        if stat.S_ISREG(there.st_mode) and there.st_size < self._file.tell():
            raise UnreadableTraceError(f"{self._path} was cut while it was read: start again")


def _wait_for(path: Path, pause: Callable[[], object], missing: Callable[[], object]) -> io.FileIO:
    is_told = False
    while True:
        try:
            return path.open("rb", buffering=0)
        except FileNotFoundError:
            if not is_told:
                missing()
            is_told = True
            pause()
        except OSError as error:
            raise UnreadableTraceError(f"{path} cannot be opened ({error.strerror})") from error
