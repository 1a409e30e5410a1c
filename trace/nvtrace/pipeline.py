"""The structlog pipeline: an event goes through processors, is encoded, and written to a sink.

    TraceLogger.emit(event)
        -> processors (yours: see, change, drop)   event_dict {"event": name, "record": struct}
        -> encode                                  bytes, one JSON line
        -> Sink.write                              a buffer; flushed once per engine step

Without processors, `Sink.take` encodes an event into that buffer directly.

The logger does not use `structlog.configure`, so that it does not affect the application's logging.
"""

from __future__ import annotations

import gzip
import io
import os
import random
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import zstandard

from nvtrace.envelope import Footer, Header, encode_into
from nvtrace.files import Existing, NewFile, create_file

_draws = random.getstate()
import structlog  # noqa: E402 - it imports rich, if that is installed, which uses `random`

random.setstate(_draws)  # the caller's random numbers stay the same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from structlog.typing import EventDict, Processor

    from nvtrace.events import Event

DropEvent = structlog.DropEvent
_COMPRESSED_FLUSH_SECONDS = 1.0


class TraceLogger(structlog.BoundLoggerBase):
    """A structlog logger with one method, which takes a typed event."""

    def emit(self, record: Header | Footer | Event) -> bool:
        """Send one record through the pipeline. Returns False if it was dropped."""
        tag = str(record.__struct_config__.tag)
        return self._proxy_to_logger("write", tag, record=record) is not None


def make_emit(
    sink: Sink, processors: Iterable[Processor] = ()
) -> Callable[[Header | Footer | Event], bool]:
    """Return a function that sends a record through the processors to `sink`; False if dropped.

    A processor may raise structlog.DropEvent. Header and footer are never dropped, even if a
    processor raises an error for them: without them the rest could not be read.
    """
    chain = [*map(_passing, processors)]
    return TraceLogger(sink, [*chain, encode], {}).emit if chain else sink.take


def _passing(processor: Processor) -> Processor:
    def process(logger: object, method: str, event_dict: EventDict) -> Any:  # noqa: ANN401 - a processor's
        if not isinstance(event_dict["record"], Header | Footer):
            return processor(logger, method, event_dict)
        as_it_was = dict(event_dict)
        try:
            return processor(logger, method, event_dict)
        except (structlog.DropEvent, Exception):  # noqa: BLE001 - it may expect events only
            return as_it_was

    return process


def encode(_logger: object, _method: str, event_dict: EventDict) -> bytes:
    """The last processor: encode the record as a line."""
    buffer = bytearray()
    encode_into(event_dict["record"], buffer)
    return bytes(buffer)


class Sink:
    """Writes whole lines to one file, with a buffer.

    A failed write (a full disk, say) is reported once; after that all lines are counted as lost,
    and the engine goes on. A fork of the process writes nothing: the file is its parent's.

    Args:
        file: an open binary file.
        report: called with a message about a failed write; None: it is printed on stderr.
        seconds_between_flushes: 0 writes at every flush. A compressed file is flushed less often,
            because each flush makes the compression worse.
        made: the file on disk that `file` writes to.

    Attributes:
        place: the name of the file on disk; None if it is not known. If another process renames the
            file, this is updated when it is closed.
        is_removed: was the file deleted before it was closed?
    """

    def __init__(
        self,
        file: BinaryIO,
        *,
        report: Callable[[str], None] | None = None,
        seconds_between_flushes: float = 0.0,
        made: NewFile | None = None,
    ) -> None:
        self._file = file
        self.made = made
        self.place = None if made is None else made.path
        self.is_removed = False
        self._owner = os.getpid()
        self.report = report or _report_on_stderr
        self._seconds_between_flushes = seconds_between_flushes
        self._last_flush = time.monotonic()
        self._buffer = bytearray()
        self.error: Exception | None = None
        self.num_lost = 0

    def write(self, line: bytes) -> bool:
        """Buffer one line until the next flush. Returns True: it was not dropped."""
        self._buffer += line
        return True

    def take(self, record: Header | Footer | Event) -> bool:
        """Encode a record and buffer its line, as `write` does."""
        encode_into(record, self._buffer)
        return True

    def flush(self) -> None:
        """Write the buffered lines to the file (a compressed file: about once a second).

        After this, they are not lost if the process is killed.
        """
        if time.monotonic() - self._last_flush >= self._seconds_between_flushes:
            self._flush()

    @property
    def is_forked(self) -> bool:
        """Is this a fork of the process that opened it?"""
        return os.getpid() != self._owner

    def close(self) -> None:
        """Flush, and close the file."""
        self._flush()
        if self.is_forked:
            return
        if self.made is not None and not self.made.file.closed:
            self.place = next(iter(self.made.names()), None)
            self.is_removed = not os.fstat(self.made.file.fileno()).st_nlink
        try:
            self._file.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def discard(self) -> None:
        """Undo what opening it did to files, and close it."""
        if self.made is not None and not self.made.file.closed:
            self.made.undo()
        self.close()

    def _flush(self) -> None:
        if self.is_forked:
            self._buffer = bytearray()
            return
        lines = self._buffer
        if self.error is None:
            try:
                rest = memoryview(bytes(lines))  # a copy: `lines` may grow after an interrupt
                while rest:  # an unbuffered write may be short
                    rest = rest[self._file.write(rest) :]
                self._file.flush()
            except Exception as error:  # noqa: BLE001 - from the file or the compressor: the engine goes on
                self._fail(error)
        if self.error is not None:
            self.num_lost += lines.count(b"\n")
        self._buffer = bytearray()  # only now, so that an interrupt does not lose them
        self._last_flush = time.monotonic()

    def _fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            self.report(f"the trace can no longer be written ({error}); the run goes on")


def _report_on_stderr(message: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or None
        sys.stderr.write(f"nvtrace: {message}\n")


def open_sink(
    path: Path, *, existing: Existing = "keep", report: Callable[[str], None] | None = None
) -> tuple[Sink, Path | None]:
    """Open a trace file for writing, compressed if its name ends in .gz or .zst.

    Args:
        path: the file; its folder must exist. A link is followed.
        existing: if there is a file of this name, "keep" renames it, "replace" replaces it, "error"
            raises FileExistsError. A pipe or a device is written to.
        report: see `Sink`.

    Returns:
        The sink, and the new name of an older file (None if there was none).
    """
    made = create_file(path, existing)
    return sink_of(made, path, report), made.kept


def sink_of(made: NewFile, path: Path, report: Callable[[str], None] | None = None) -> Sink:
    """The sink that writes to `made`, compressed if the name of `path` says so."""
    file: BinaryIO = cast("BinaryIO", made.file)
    if path.suffix == ".gz":
        buffered = io.BufferedWriter(made.file)
        packed = gzip.GzipFile(path.stem, "wb", compresslevel=6, fileobj=buffered)
        packed.myfileobj = buffered  # type: ignore[assignment]  # GzipFile.close() closes it
        file = cast("BinaryIO", packed)
    elif path.suffix == ".zst":
        buffered = io.BufferedWriter(made.file)
        file = cast("BinaryIO", zstandard.ZstdCompressor().stream_writer(buffered))
    seconds = 0.0 if file is made.file else _COMPRESSED_FLUSH_SECONDS
    return Sink(file, report=report, seconds_between_flushes=seconds, made=made)
