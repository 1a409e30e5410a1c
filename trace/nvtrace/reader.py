"""Reader: path -> records, one line at a time, in bounded memory.

Knows files, compression, and what may be wrong with a line. Does not know what events mean
(`replay.py`). Reading needs no engine and no torch.

A killed run leaves a trace without a footer, perhaps with its last line cut: both are warnings,
and everything before is read. Anything else that is no record is an error with its line number.

With tensor parallelism each rank has a file of its own, trace.rank1.jsonl beside trace.jsonl.
`read_ranks` reads them together.
"""

from __future__ import annotations

import gzip
import heapq
import io
import itertools
import sys
import zlib
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgspec
import zstandard

from nvtrace.envelope import VERSION, Footer, Header, NewerTraceError, Record, Unknown, decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MAX_LINE_BYTES = 256 * 1024 * 1024
_COMPRESSED_CHUNK_BYTES = 16 * 1024
_TRUNCATED = (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile)


class UnreadableTraceError(ValueError):
    """There is no trace to read, or it is broken before its end."""


def read_trace(
    source: str | Path | BinaryIO, *, warn: Callable[[str], None] | None = None
) -> Iterator[Record]:
    """Read a trace.

    Args:
        source: a path (.gz and .zst are decompressed), "-" for stdin, or an open binary file.
        warn: takes a sentence about each thing that is wrong but survivable: a cut last line, a
            missing footer, unknown events. Ignored if None.

    Yields:
        The Header first, then every event in its order, a Footer last if there is one.

    Raises:
        UnreadableTraceError: no such file, not a trace, or a line that is no record.
        NewerTraceError: the trace's format is of a newer major version.
    """
    name = source if isinstance(source, str | Path) else getattr(source, "name", "the trace")
    file = open_trace(source) if isinstance(source, str | Path) else source
    with file:
        yield from _records(raw_lines(file, name), name, warn or _ignore)


def read_ranks(
    source: str | Path, *, warn: Callable[[str], None] | None = None
) -> Iterator[tuple[int, Record]]:
    """Read the traces of all ranks together, ordered by step, rank and event.

    Rank 0's alone says what was requested, scheduled and sampled: fold that one.

    Args:
        source: path of rank 0's trace; the others lie beside it, by `rank_path`. "-" (stdin), and
            the path of another rank's trace, are read alone.
        warn: see `read_trace`. A rank whose file is missing, or is of another run, is left out
            with a warning.

    Yields:
        (rank, record) for all that `read_trace` yields of each: all headers first, footers last.
        What happens between two steps comes after the first of them, on every rank.

    Raises:
        See `read_trace`, for any of the files.
    """
    records = read_trace(source, warn=warn)
    header = cast("Header", next(records))
    streams = [_keyed(header.rank, itertools.chain([header], records))]
    if header.rank == 0 and str(source) != "-":
        for rank in range(1, header.world_size):
            others = _of_same_run(rank_path(Path(source), rank), header, warn or _ignore)
            streams.append(_keyed(rank, others))
    for key, record in heapq.merge(*streams, key=itemgetter(0)):
        yield key[2], record


def rank_path(path: Path, rank: int) -> Path:
    """Where a rank's trace lies, if rank 0's lies at `path`: trace.jsonl, trace.rank1.jsonl ..."""
    if rank == 0:
        return path
    ending = Path(path.stem).suffix + path.suffix if path.suffix in {".gz", ".zst"} else path.suffix
    return path.with_name(f"{path.name.removesuffix(ending)}.rank{rank}{ending}")


def _of_same_run(path: Path, first: Header, warn: Callable[[str], None]) -> Iterator[Record]:
    """The records of another rank's trace; none if it is not there, or not of the same run."""
    if not path.is_file():
        warn(f"{path} is missing: the run had {first.world_size} ranks, and one is left out")
        return
    records = read_trace(path, warn=warn)
    header = cast("Header", next(records))
    if header.run_id != first.run_id:
        warn(f"{path} is of another run: it is left out")
        return
    yield header
    yield from records


def _keyed(rank: int, records: Iterable[Record]) -> Iterator[tuple[tuple[int, bool, int], Record]]:
    """Each record with its place among those of all ranks: (step, is it after that step, rank)."""
    step, is_after = 0, False
    for record in records:
        match record:
            case Header():
                yield (-1, False, rank), record
            case Footer():
                yield (sys.maxsize, True, rank), record
            case Unknown():  # it stays behind its neighbour
                yield (step, is_after, rank), record
            case _:
                is_after = record.step is None
                step = record.step or step
                yield (step, is_after, rank), record


def _records(
    lines: Iterator[tuple[int, bytes, bool]], name: str | Path, warn: Callable[[str], None]
) -> Iterator[Record]:
    tally = _Tally()
    record: Record | None = None
    for number, line, is_whole in lines:
        try:
            record = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if not is_whole and number > 1:
                warn(f"{name}: the last line ({number}) is cut; everything before it was read")
                return
            raise UnreadableTraceError(_broken(name, number, line, error)) from error
        if number == 1:
            _check_header(record, name)
        elif isinstance(record, Header):
            raise UnreadableTraceError(f"{name}: line {number} is a second header")
        tally.count(record)
        yield record
    if record is None:
        raise UnreadableTraceError(f"{name} is empty: no trace was written to it")
    for what in tally.complaints():
        warn(f"{name}: {what}")
    if not isinstance(record, Footer):
        warn(f"{name} has no footer: the run was cut off; everything it wrote was read")


class _Tally:
    """Counts what is not known, and what is not there: events are numbered without gaps."""

    def __init__(self) -> None:
        self.unknown: Counter[str] = Counter()
        self.last_id = 0
        self.num_missing = 0

    def count(self, record: Record) -> None:
        event_id: object = None
        if isinstance(record, Unknown):
            self.unknown[record.event] += 1
            event_id = record.fields.get("event_id")
        elif not isinstance(record, Header):
            event_id = record.event_id
        if isinstance(event_id, int):
            self.num_missing += max(event_id - self.last_id - 1, 0)
            self.last_id = event_id

    def complaints(self) -> Iterator[str]:
        if self.unknown:
            kinds = ", ".join(f"{tag} x {count}" for tag, count in sorted(self.unknown.items()))
            yield f"events of a newer nvtrace were passed over: {kinds}"
        if self.num_missing:
            yield f"{self.num_missing} events are missing, by the numbers of those that are there"


def _check_header(record: Record, name: str | Path) -> None:
    if not isinstance(record, Header) or record.schema != "nvtrace":
        raise UnreadableTraceError(f"{name} is not an nvtrace trace: its first line is no header")
    if record.version[0] > VERSION[0]:
        raise NewerTraceError(
            f"{name} has format version {record.version[0]}.{record.version[1]}, and this nvtrace "
            f"reads up to {VERSION[0]}.x: install a newer nanovllm to read it"
        )


def _broken(name: str | Path, number: int, line: bytes, error: Exception) -> str:
    if number == 1:
        return f"{name} is not an nvtrace trace: its first line is no header"
    shown = line[:60].decode("utf-8", "replace")
    return f"{name}: line {number} is no record ({error}): {shown!r}"


def raw_lines(file: BinaryIO, name: str | Path) -> Iterator[tuple[int, bytes, bool]]:
    """(number, line, does it end in a newline) of each line that is not blank."""
    number = 0
    while True:
        try:
            line = file.readline(MAX_LINE_BYTES)
        except _TRUNCATED as error:
            if number == 0:
                raise UnreadableTraceError(f"{name} cannot be decompressed ({error})") from error
            if isinstance(error, EOFError):
                return  # a compressed file without its end: a cut tail, said by the missing footer
            raise UnreadableTraceError(
                f"{name} is damaged after line {number} ({error})"
            ) from error
        except OSError as error:
            raise UnreadableTraceError(f"{name} cannot be read ({error.strerror})") from error
        if not line:
            return
        number += 1
        if len(line) == MAX_LINE_BYTES:
            raise UnreadableTraceError(f"{name}: line {number} is longer than any record")
        if line.strip():
            yield number, line, line.endswith(b"\n")


def open_trace(source: str | Path) -> BinaryIO:
    """Open a trace, decompressed; "-" is stdin.

    Raises:
        UnreadableTraceError: it cannot be opened.
    """
    if str(source) == "-":
        return sys.stdin.buffer
    path = Path(source)
    try:
        if path.is_dir():
            raise UnreadableTraceError(f"{path} is a folder: name a trace file in it")
        file = path.open("rb")
    except FileNotFoundError as error:
        raise UnreadableTraceError(f"{path}: no such file") from error
    except OSError as error:
        raise UnreadableTraceError(f"{path} cannot be opened ({error.strerror})") from error
    if path.suffix == ".gz":
        file.close()  # only opened to see whether it can be
        return cast("BinaryIO", gzip.open(path, "rb"))
    if path.suffix == ".zst":
        return cast("BinaryIO", io.BufferedReader(_ZstdFile(file)))
    return file


class _ZstdFile(io.RawIOBase):
    """Decompresses a file, also one without its end, to the last byte that is in it.

    (zstandard's own stream_reader keeps back what it has decoded when its input ends in a frame.)
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True)
        self._decoded = memoryview(b"")

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any writable buffer
        """Fill `buffer`; 0 at the end."""
        while not self._decoded:
            compressed = self._file.read(_COMPRESSED_CHUNK_BYTES)
            if not compressed:
                return 0
            self._decoded = memoryview(self._decompressor.decompress(compressed))
        num_bytes = min(len(buffer), len(self._decoded))
        buffer[:num_bytes] = self._decoded[:num_bytes]
        self._decoded = self._decoded[num_bytes:]
        return num_bytes

    def close(self) -> None:
        """Close the file beneath as well."""
        self._file.close()
        super().close()


def _ignore(_message: str) -> None:
    pass
