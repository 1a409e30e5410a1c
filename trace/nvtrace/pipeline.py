"""The structlog pipeline: an event goes through processors, becomes a line, lands in a sink.

    TraceLogger.emit(event)
        -> processors (yours: see, change, drop)   event_dict {"event": name, "record": struct}
        -> encode                                  bytes, one JSON line
        -> Sink.write                              a buffer; flushed once per engine step

Without processors, `Sink.take` encodes an event into that buffer directly.

Knows structlog, bytes and files. Does not know what an event means or when a step ends
(`recorder.py`). The logger is built by hand and never touches `structlog.configure`, so that an
application's own logging stays its own.
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
from nvtrace.files import Existing, Made, make

_draws = random.getstate()
import structlog  # noqa: E402 - it imports rich, if that is there, which draws from `random`

random.setstate(_draws)  # the caller's numbers stay the same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from structlog.typing import EventDict, Processor

    from nvtrace.events import Event

DropEvent = structlog.DropEvent
_COMPRESSED_FLUSH_SECONDS = 1.0


class TraceLogger(structlog.BoundLoggerBase):
    """A structlog logger whose one method takes a typed event."""

    def emit(self, record: Header | Footer | Event) -> bool:
        """Send one record down the pipeline. Returns whether it came through."""
        tag = str(record.__struct_config__.tag)
        return self._proxy_to_logger("write", tag, record=record) is not None


def make_emit(
    sink: Sink, processors: Iterable[Processor] = ()
) -> Callable[[Header | Footer | Event], bool]:
    """What sends a record through the processors into `sink`, and says whether it got there.

    A processor may raise structlog.DropEvent. Header and footer pass all the same, also through a
    processor that reads a field they do not have: without them the rest could not be read.
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
        except (structlog.DropEvent, Exception):  # noqa: BLE001 - it was written for events
            return as_it_was

    return process


def encode(_logger: object, _method: str, event_dict: EventDict) -> bytes:
    """The last processor: the record's line."""
    buffer = bytearray()
    encode_into(event_dict["record"], buffer)
    return bytes(buffer)


class Sink:
    """Whole lines into one file, buffered.

    A write that fails (a full disk) is reported once and loudly; from then on lines are counted as
    lost and the engine goes on.

    Args:
        file: an open binary file.
        report: takes the one sentence about a failed write; stderr by default.
        seconds_between_flushes: 0 writes at every flush; a compressed file waits, since each flush
            costs compression.
        made: the file on the disk that `file` writes to.

    Attributes:
        place: the name that the file on the disk has, as far as is known; None if it is not known.
            Somebody may rename it, which shows when it is closed.
        is_removed: had the file no name any more when it was closed? Then it is gone.

    A fork of the process writes nothing: the file is its parent's.
    """

    def __init__(
        self,
        file: BinaryIO,
        *,
        report: Callable[[str], None] | None = None,
        seconds_between_flushes: float = 0.0,
        made: Made | None = None,
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
        """Take one line; it reaches the file with the next flush. Returns True, as no drop does."""
        self._buffer += line
        return True

    def take(self, record: Header | Footer | Event) -> bool:
        """Take a record's line, as `write` does."""
        encode_into(record, self._buffer)
        return True

    def flush(self) -> None:
        """Hand the buffered lines to the operating system (a compressed file: about once a second).

        After this a killed process loses none of them.
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
        """Nothing came of it: undo what opening it did to files, and close it."""
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
                rest = memoryview(bytes(lines))  # a copy: `lines` may grow after an interruption
                while rest:  # an unbuffered write may be short
                    rest = rest[self._file.write(rest) :]
                self._file.flush()
            except Exception as error:  # noqa: BLE001 - a closed file's, a compressor's: the engine goes on
                self._fail(error)
        if self.error is not None:
            self.num_lost += lines.count(b"\n")
        self._buffer = bytearray()  # not before: an interruption must not lose them
        self._last_flush = time.monotonic()

    def _fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            self.report(f"the trace can no longer be written ({error}); the run goes on")


def _report_on_stderr(message: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # closed, or none at all: nobody listens
        sys.stderr.write(f"nvtrace: {message}\n")


def open_sink(
    path: Path, *, existing: Existing = "keep", report: Callable[[str], None] | None = None
) -> tuple[Sink, Path | None]:
    """Open a trace file for writing, compressed if its name ends in .gz or .zst.

    Args:
        path: the file; its folder must exist. Where it is a link, what it leads to is meant.
        existing: what to do with a file that is there: "keep" renames it, "replace" puts the new
            one in its place, "error" raises FileExistsError. A pipe or a device is written.
        report: see `Sink`.

    Returns:
        The sink, and where a kept file is now (None if there was none).
    """
    made = make(path, existing)
    return sink_of(made, path, report), made.kept


def sink_of(made: Made, path: Path, report: Callable[[str], None] | None = None) -> Sink:
    """The sink that writes into a file that was made for a trace at `path`."""
    file: BinaryIO = cast("BinaryIO", made.file)
    if path.suffix == ".gz":
        buffered = io.BufferedWriter(made.file)
        packed = gzip.GzipFile(path.stem, "wb", compresslevel=6, fileobj=buffered)
        packed.myfileobj = buffered  # type: ignore[assignment]  # what it closes with itself
        file = cast("BinaryIO", packed)
    elif path.suffix == ".zst":
        buffered = io.BufferedWriter(made.file)
        file = cast("BinaryIO", zstandard.ZstdCompressor().stream_writer(buffered))
    seconds = 0.0 if file is made.file else _COMPRESSED_FLUSH_SECONDS
    return Sink(file, report=report, seconds_between_flushes=seconds, made=made)
