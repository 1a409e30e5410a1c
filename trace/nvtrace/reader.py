"""Reader: path -> records, some hundred lines at a time, in bounded memory.

Knows files, compression, and what may be wrong with a line. Does not know what events mean
(`replay.py`). Reading needs no engine and no torch.

A killed run leaves a trace without a footer, perhaps with its last line cut: both are warnings,
and everything before is read. Anything else that is no record is an error with its line number.

A block of lines is decoded in one go. If anything in it is not plain - the header, a blank line, an
event that is not known, a line that is no record - its lines are looked at one by one: that is the
slow way, and the only one that judges.

With tensor parallelism each rank has a file of its own, trace.rank1.jsonl beside trace.jsonl.
`read_ranks` reads them together.
"""

from __future__ import annotations

import heapq
import io
import sys
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import msgspec

from nvtrace.envelope import (
    Footer,
    Header,
    NewerTraceError,
    Record,
    Unknown,
    check_version,
    decode,
    decode_events,
)
from nvtrace.tally import Tally
from nvtrace.unpack import MAGIC, BombError, UnpackError, unpacked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MAX_LINE_BYTES = 256 * 1024 * 1024
_MAX_WORLD_SIZE = 4096  # each rank's file is looked for
_MAX_MESSAGE_LEN = 200  # of a decoder that quotes what it was given
_BLOCK_BYTES = 32 * 1024  # some hundred records: what a core has close by
_SAVE_AS = "save it as UTF-8 without a byte order mark"
_NO_TEXT = {  # what a file begins with, and what it is then
    b"\xef\xbb\xbf": f"UTF-8 with a byte order mark; {_SAVE_AS}",
    b"\xff\xfe\0\0": f"UTF-32; {_SAVE_AS}",
    b"\0\0\xfe\xff": f"UTF-32; {_SAVE_AS}",
    b"{\0\0\0": f"UTF-32; {_SAVE_AS}",
    b"\0\0\0{": f"UTF-32; {_SAVE_AS}",
    b"\xff\xfe": f"UTF-16; {_SAVE_AS}",
    b"\xfe\xff": f"UTF-16; {_SAVE_AS}",
    b"{\0": f"UTF-16; {_SAVE_AS}",
    b"\0{": f"UTF-16; {_SAVE_AS}",
    b"BZh": "packed with bzip2: unpack it first",
    b"\xfd7zXZ\0": "packed with xz: unpack it first",
    b"\x04\x22\x4d\x18": "packed with lz4: unpack it first",
    b"]\0\0": "packed with lzma: unpack it first",
    b"7z\xbc\xaf\x27\x1c": "a 7z file: unpack it first",
    b"PK\x03\x04": "a zip file: unpack it first",
    **dict.fromkeys(MAGIC, "packed twice: unpack it once"),
}
STDIN = "standard input"


class UnreadableTraceError(ValueError):
    """There is no trace to read, or it is broken before its end."""


def read_trace(
    source: str | Path | BinaryIO,
    *,
    warn: Callable[[str], None] | None = None,
    watch: Callable[[int], None] | None = None,
    name: str | Path | None = None,
) -> Iterator[Record]:
    """Read a trace.

    Args:
        source: a path, "-" for standard input, or an open binary file; what is packed with gzip or
            zstd, whatever its name is, is unpacked.
        warn: takes a sentence about each thing that is wrong but survivable: a cut last line, a
            missing footer, unknown events. Ignored if None.
        watch: told now and then how many bytes of the file were read; of a pipe it hears nothing.
        name: what messages call it; None for the name that it has.

    Yields:
        The Header first, then every event in its order, a Footer last if there is one.

    Raises:
        UnreadableTraceError: no such file, not a trace, or a line that is no record.
        NewerTraceError: the trace's format is of a newer major version.
    """
    for block in read_blocks(source, warn=warn, watch=watch, name=name):
        yield from block
        del block  # so that its records go before the next ones come


def read_blocks(
    source: str | Path | BinaryIO,
    *,
    warn: Callable[[str], None] | None = None,
    watch: Callable[[int], None] | None = None,
    name: str | Path | None = None,
) -> Iterator[list[Record]]:
    """Read a trace, some hundred records at a time: as `read_trace`, for those in a hurry.

    Each block is given out as soon as its lines are there, however few: a pipe, or a file that is
    still growing, is never waited for without need.

    Args:
        source: see `read_trace`.
        warn: see `read_trace`.
        watch: see `read_trace`.
        name: see `read_trace`.

    Yields:
        What `read_trace` yields, in lists.

    Raises:
        UnreadableTraceError, NewerTraceError: see `read_trace`.
    """
    name = name_of(source) if name is None else name
    file = open_trace(source) if isinstance(source, str | Path) else source
    with file:
        for block in _decoded(line_blocks(file, name), name, warn or _ignore):
            if watch is not None and file.seekable():
                watch(file.tell())
            yield block
            del block  # so that its records go before the next ones come


def name_of(source: str | Path | BinaryIO) -> str | Path:
    """What messages call a trace."""
    if not isinstance(source, str | Path):
        return cast("str", getattr(source, "name", "the trace"))
    return STDIN if str(source) == "-" else source


def read_ranks(
    source: str | Path, *, warn: Callable[[str], None] | None = None
) -> Iterator[tuple[int, Record]]:
    """Read the traces of all ranks together, ordered by step, rank and event.

    Rank 0's alone says what was requested, scheduled and sampled: fold that one.

    Args:
        source: path of rank 0's trace; the others lie beside it, by `rank_path`. "-" (standard
            input), and the path of another rank's trace, are read alone.
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
    streams = [_keyed(header.rank, chain([header], records))]
    if header.rank == 0 and str(source) != "-":
        for rank in range(1, header.world_size):
            blocks = blocks_of_rank(Path(source), rank, header, warn or _ignore)
            streams.append(_keyed(rank, chain.from_iterable(blocks)))
    for key, record in heapq.merge(*streams, key=itemgetter(0)):
        yield key[2], record


def read_first_rank(
    source: str | Path,
    *,
    warn: Callable[[str], None] | None = None,
    watch: Callable[[int], None] | None = None,
) -> Iterator[Record]:
    """Read the trace of the rank that tells all, and look at those of the others as well.

    Args:
        source: see `read_ranks`.
        warn: the same.
        watch: see `read_trace`; if there are several files, it hears nothing.
    """
    records = read_trace(source, warn=warn, watch=watch)
    header = cast("Header", next(records))
    if header.world_size == 1 or header.rank or not Path(source).is_file():
        yield from chain([header], records)
        return
    yield from (record for rank, record in read_ranks(source, warn=warn) if rank == header.rank)


def rank_path(path: Path, rank: int) -> Path:
    """Where a rank's trace lies, if rank 0's lies at `path`: trace.jsonl, trace.rank1.jsonl ..."""
    if rank == 0:
        return path
    is_packed = path.suffix.lower() in {".gz", ".zst"}
    ending = Path(path.stem).suffix + path.suffix if is_packed else path.suffix
    return path.with_name(f"{path.name.removesuffix(ending)}.rank{rank}{ending}")


def blocks_of_rank(
    first_path: Path, rank: int, first: Header, warn: Callable[[str], None]
) -> Iterator[list[Record]]:
    """Another rank's trace, in blocks; none if it is not there, or not of the same run.

    Args:
        first_path: rank 0's trace.
        rank: whose trace to read.
        first: rank 0's header.
        warn: see `read_trace`.
    """
    path = rank_path(first_path, rank)
    if not path.is_file():
        warn(f"{path} is missing: the run had {first.world_size} ranks, and this one is left out")
        return
    blocks = read_blocks(path, warn=warn)
    block = next(blocks)
    if cast("Header", block[0]).run_id != first.run_id:
        warn(f"{path} is of another run: it is left out")
        return
    yield block
    yield from blocks


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


def _decoded(
    blocks: Iterator[tuple[int, list[bytes]]], name: str | Path, warn: Callable[[str], None]
) -> Iterator[list[Record]]:
    tally = Tally()
    for number, lines in blocks:
        records, problem = _all_at_once(lines) if tally.has_header else None, None
        if records is None:
            records, problem = _one_by_one(lines, number, name, has_header=tally.has_header)
        if tally.count(records):  # said at once, since what is made of the rest may fail
            warn(f"{name}: the processors of record() dropped some events")
        if records:
            yield records
            del records  # so that they go before the next ones come
        if isinstance(problem, str):
            if tally.num_after_footer is None:
                warn(problem)
                return
            tally.num_after_footer += 1  # what comes after the end was not cut off
        elif problem is not None:
            raise problem
    if not tally.has_header:
        raise UnreadableTraceError(f"{name} is empty: no trace was written to it")
    for complaint in tally.complaints(name):
        warn(complaint)


def _all_at_once(lines: list[bytes]) -> list[Record] | None:
    """Decode lines that are all plain events; None if one of them is not."""
    try:
        return cast("list[Record]", decode_events(lines))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _one_by_one(
    lines: list[bytes], first: int, name: str | Path, *, has_header: bool
) -> tuple[list[Record], ValueError | str | None]:
    """Decode lines up to the first that is no record.

    Args:
        lines: each with its end; blank ones are passed over.
        first: the number of the first one.
        name: of the trace.
        has_header: has the trace's header come before them?

    Returns:
        The records, and what is wrong with the next line: an error, or a warning if it is cut.
    """
    records: list[Record] = []
    for number, line in enumerate(lines, first):
        if line.isspace():
            continue
        try:
            record = decode(line)
            if not has_header:
                _check_header(record, name)
            elif isinstance(record, Header):
                return records, UnreadableTraceError(f"{name}: line {number} is a second header")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if has_header and not line.endswith(b"\n"):
                return records, (
                    f"{name}: the last line ({number}) is cut; everything before it was read"
                )
            problem = UnreadableTraceError(
                _broken(name, number, line, error) if has_header else _no_header(name, line, error)
            )
            problem.__cause__ = error
            return records, problem
        except NewerTraceError as error:
            return records, NewerTraceError(f"{name}: {error}")
        except UnreadableTraceError as error:
            return records, error
        has_header = True
        records.append(record)
    return records, None


def _check_header(record: Record, name: str | Path) -> None:
    if not isinstance(record, Header) or record.schema != "nvtrace":
        raise UnreadableTraceError(_no_trace(name))
    if not 0 <= record.rank < record.world_size <= _MAX_WORLD_SIZE:
        raise UnreadableTraceError(
            f"{name} has rank {record.rank} of {record.world_size}, which no run has"
        )
    check_version({"version": [*record.version]})


def why_no_text(name: str | Path, first_line: bytes) -> str | None:
    """What a file is that cannot be a trace, in a sentence; None if it is text, or not known."""
    for start, what in _NO_TEXT.items():
        if first_line.startswith(start):
            return f"{_no_trace(name)}: it is {what}"
    return None


def _no_trace(name: str | Path) -> str:
    return f"{name} is not an nvtrace trace: its first line is not a header"


def _no_header(name: str | Path, line: bytes, error: Exception) -> str:
    no_text = why_no_text(name, line)
    if no_text is not None:
        return no_text
    if b'"TRACE_HEADER"' in line and isinstance(error, msgspec.ValidationError):
        why = str(error)[:_MAX_MESSAGE_LEN]
        return f"{name} is not an nvtrace trace: its first line is not a valid header ({why})"
    return _no_trace(name)


def _broken(name: str | Path, number: int, line: bytes, error: Exception) -> str:
    shown = line[:60].decode("utf-8", "replace")
    return f"{name}: line {number} is not a record ({str(error)[:_MAX_MESSAGE_LEN]}): {shown!r}"


def raw_lines(file: BinaryIO, name: str | Path) -> Iterator[tuple[int, bytes, bool]]:
    """(number, line, does it end in a newline) of each line that is not blank.

    Raises:
        UnreadableTraceError: see `line_blocks`.
    """
    for first, lines in line_blocks(file, name):
        for number, line in enumerate(lines, first):
            if not line.isspace():
                yield number, line, line.endswith(b"\n")


def line_blocks(file: BinaryIO, name: str | Path) -> Iterator[tuple[int, list[bytes]]]:
    """(number of the first one, whole lines), as they come; the last may lack its newline.

    Args:
        file: with a `read1`, of which a block is made; else with a `read`.
        name: for errors.

    Raises:
        UnreadableTraceError: it cannot be read or unpacked, or has a line without an end.
    """
    read = getattr(file, "read1", file.read)
    number = 1
    rest: list[bytes] = []  # of a line whose end has not come
    num_rest_bytes = 0
    chunks = unpacked(read, _BLOCK_BYTES)
    while chunk := _some_bytes(chunks, name, number - 1):
        if not rest and chunk.isspace() and chunk.endswith(b"\n"):
            number += chunk.count(b"\n")  # there may be millions of them: as quickly as can be
            continue
        lines = io.BytesIO(chunk).readlines()
        is_whole = lines[-1].endswith(b"\n")
        if is_whole or len(lines) > 1:
            lines[0] = b"".join((*rest, lines[0]))
            rest, num_rest_bytes = [] if is_whole else [lines.pop()], 0
            yield number, lines
            number += len(lines)
        else:
            rest.append(chunk)
            num_rest_bytes += len(chunk)
            if num_rest_bytes >= MAX_LINE_BYTES:
                raise UnreadableTraceError(f"{name}: line {number} is longer than any record")
    if rest:
        yield number, [b"".join(rest)]


def _some_bytes(chunks: Iterator[bytes], name: str | Path, num_lines: int) -> bytes:
    """What comes next; nothing at the end, be it cut off or not."""
    try:
        return next(chunks, b"")
    except UnpackError as error:
        what = f"is damaged after line {num_lines}" if num_lines else "cannot be decompressed"
        raise UnreadableTraceError(f"{name} {what} ({error})") from error
    except BombError as error:
        raise UnreadableTraceError(f"{name} {error}") from error
    except OSError as error:
        raise UnreadableTraceError(f"{name} cannot be read ({error.strerror})") from error


def open_trace(source: str | Path) -> BinaryIO:
    """Open a trace; "-" is standard input.

    Raises:
        UnreadableTraceError: it cannot be opened.
    """
    if str(source) == "-":
        return sys.stdin.buffer
    path = Path(source)
    try:
        if path.is_dir():
            raise UnreadableTraceError(f"{path} is a folder: give a trace file in it")
        file = path.open("rb")
    except FileNotFoundError as error:
        raise UnreadableTraceError(f"{path}: no such file") from error
    except OSError as error:
        raise UnreadableTraceError(f"{path} cannot be opened ({error.strerror})") from error
    return file


def _ignore(_message: str) -> None:
    pass
