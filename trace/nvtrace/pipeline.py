"""The structlog pipeline: an event goes through processors, becomes a line, lands in a sink.

    TraceLogger.emit(event)
        -> processors (yours: see, change, drop)   event_dict {"event": name, "record": struct}
        -> encode                                  bytes, one JSON line
        -> Sink.write                              a buffer; flushed once per engine step

Knows structlog, bytes and files. Does not know what an event means or when a step ends
(`recorder.py`). The logger is built by hand and never touches `structlog.configure`, so that an
application's own logging stays its own.
"""

from __future__ import annotations

import gzip
import random
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

import zstandard

from nvtrace.envelope import encode_into

_draws = random.getstate()
import structlog  # noqa: E402 - it imports rich, if that is there, which draws from `random`

random.setstate(_draws)  # the caller's numbers stay the same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, MutableMapping
    from pathlib import Path

    from structlog.typing import Processor

    from nvtrace.envelope import Footer, Header
    from nvtrace.events import Event

Existing = Literal["keep", "replace", "error"]

DropEvent = structlog.DropEvent
_COMPRESSED_FLUSH_SECONDS = 1.0


class TraceLogger(structlog.BoundLoggerBase):
    """A structlog logger whose one method takes a typed event."""

    def emit(self, record: Header | Footer | Event) -> None:
        """Send one record down the pipeline."""
        self._proxy_to_logger("write", str(record.__struct_config__.tag), record=record)


def make_logger(sink: Sink, processors: Iterable[Processor] = ()) -> TraceLogger:
    """The pipeline in front of `sink`; a processor may raise structlog.DropEvent."""
    return TraceLogger(sink, [*processors, encode], {})


def encode(_logger: object, _method: str, event_dict: MutableMapping[str, Any]) -> bytes:
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
    """

    def __init__(
        self,
        file: BinaryIO,
        *,
        report: Callable[[str], None] | None = None,
        seconds_between_flushes: float = 0.0,
    ) -> None:
        self._file = file
        self.report = report or _report_on_stderr
        self._seconds_between_flushes = seconds_between_flushes
        self._last_flush = time.monotonic()
        self._lines: list[bytes] = []
        self.error: Exception | None = None
        self.num_lost = 0

    def write(self, line: bytes) -> None:
        """Take one line; it reaches the file with the next flush."""
        self._lines.append(line)

    def flush(self) -> None:
        """Hand the buffered lines to the operating system (a compressed file: about once a second).

        After this a killed process loses none of them.
        """
        if time.monotonic() - self._last_flush >= self._seconds_between_flushes:
            self._flush()

    def close(self) -> None:
        """Flush, and close the file."""
        self._flush()
        try:
            self._file.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _flush(self) -> None:
        lines = self._lines
        if self.error is None:
            try:
                rest = memoryview(b"".join(lines))
                while rest:  # an unbuffered write may be short
                    rest = rest[self._file.write(rest) :]
                self._file.flush()
            except Exception as error:  # noqa: BLE001 - a closed file's, a compressor's: the engine goes on
                self._fail(error)
        if self.error is not None:
            self.num_lost += len(lines)
        self._lines = []  # not before: an interruption must not lose them
        self._last_flush = time.monotonic()

    def _fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            self.report(f"the trace cannot be written any more ({error}); the run goes on")


def _report_on_stderr(message: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # closed, or none at all: nobody listens
        sys.stderr.write(f"nvtrace: {message}\n")


def open_sink(
    path: Path, *, existing: Existing = "keep", report: Callable[[str], None] | None = None
) -> tuple[Sink, Path | None]:
    """Open a trace file for writing, compressed if its name ends in .gz or .zst.

    Args:
        path: the file; its folder must exist.
        existing: what to do with a file that is there: "keep" renames it, "replace" overwrites it,
            "error" raises FileExistsError. A link is never renamed: with "keep", what it leads to
            must be empty or missing, or be no ordinary file.
        report: see `Sink`.

    Returns:
        The sink, and where a kept file is now (None if there was none).
    """
    kept = None
    if path.is_file() and existing != "replace":
        if existing == "error":
            raise FileExistsError(f"{path} exists: name another file")
        if not path.is_symlink():
            kept = path.rename(free_name(path))
        elif path.stat().st_size:
            raise FileExistsError(f"{path} is a link to a file that exists: name another file")
    if path.suffix == ".gz":
        file = cast("BinaryIO", gzip.open(path, "wb", compresslevel=6))  # noqa: SIM115 - Sink closes it
        return Sink(file, report=report, seconds_between_flushes=_COMPRESSED_FLUSH_SECONDS), kept
    if path.suffix == ".zst":
        file = cast("BinaryIO", zstandard.open(path, "wb"))
        return Sink(file, report=report, seconds_between_flushes=_COMPRESSED_FLUSH_SECONDS), kept
    return Sink(path.open("wb", buffering=0), report=report), kept


def free_name(path: Path) -> Path:
    """The first of trace.1.jsonl, trace.2.jsonl ... that is not taken."""
    stem, dot, endings = path.name.partition(".")
    number = 1
    while (candidate := path.with_name(f"{stem}.{number}{dot}{endings}")).exists():
        number += 1
    return candidate
