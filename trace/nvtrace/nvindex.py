"""The index beside a large trace: a file of snapshots, and where in the trace each belongs.

    digest of all that follows | snapshots, packed | SnapshotIndex in JSON | where that begins

Whatever is not right, as its digest tells, is no index: it is made anew. Only a plain file is one.
Knows this file. Does not know what a snapshot holds, or how a trace is read (`snapshots.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, BinaryIO

import msgspec
from msgspec import Meta

from nvtrace.files import name_beside

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_VERSION = 3
_DIGEST = "blake2b"
_DIGEST_BYTES = hashlib.new(_DIGEST).digest_size
_PLACE_BYTES = 8
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """Where a fold can begin. The first one is the trace's start.

    Attributes:
        step: after this one.
        offset: at this byte of the trace.
        place, num_bytes: where in the index its snapshot lies.
    """

    step: _Number
    offset: _Number
    place: _Number = 0
    num_bytes: _Number = 0


class SnapshotIndex(msgspec.Struct, frozen=True):
    """What an index says of itself, and of the trace that it is good for."""

    size: int
    mtime_ns: int
    last_step: _Number
    entries: Annotated[list[SnapshotEntry], Meta(min_length=1)]
    version: int = _VERSION

    def fits(self, trace: Path) -> bool:
        """Is the trace as it was?"""
        status = trace.stat()
        key = (_VERSION, status.st_size, status.st_mtime_ns)
        return (self.version, self.size, self.mtime_ns) == key


def pack(snapshot: bytes, file: BinaryIO, step: int, offset: int) -> SnapshotEntry:
    """Put a snapshot into an index that is being written."""
    packed = zlib.compress(snapshot, level=1)
    place = file.tell()
    file.write(packed)
    return SnapshotEntry(step, offset, place, len(packed))


def unpack(path: Path, entry: SnapshotEntry, most_bytes: int) -> bytes:
    """A snapshot of an index.

    Raises:
        OSError, zlib.error: the file is not the one any more that was read.
    """
    with _open_plain(path) as file:
        file.seek(entry.place)
        return zlib.decompressobj().decompress(file.read(entry.num_bytes), most_bytes)


def read_index(path: Path) -> SnapshotIndex | None:
    """The index; None if there is none that is right."""
    try:
        with _open_plain(path) as file:
            if file.read(_DIGEST_BYTES) != _digest_of_rest(file):
                return None
            end = file.seek(-_PLACE_BYTES, os.SEEK_END)
            place = int.from_bytes(file.read(), "little")
            if not _DIGEST_BYTES <= place <= end:
                return None
            file.seek(place)
            return msgspec.json.decode(file.read(end - place), type=SnapshotIndex)
    except (OSError, msgspec.MsgspecError):
        return None


def write_index(path: Path, fill: Callable[[BinaryIO], SnapshotIndex]) -> SnapshotIndex | None:
    """Write an index, in the place of what lies there if that is a plain file.

    Args:
        path: where.
        fill: puts the snapshots into the file, and returns what is to be said of them.

    Returns:
        What `fill` did; None if nothing can be written there.
    """
    if path.exists() and not path.is_file():
        return None
    unfinished = name_beside(path)
    try:
        file = unfinished.open("x+b")
    except OSError:
        return None
    try:
        with file:
            file.write(bytes(_DIGEST_BYTES))
            index = fill(file)
            place = file.tell()
            file.write(msgspec.json.encode(index) + place.to_bytes(_PLACE_BYTES, "little"))
            file.seek(_DIGEST_BYTES)
            digest = _digest_of_rest(file)
            file.seek(0)
            file.write(digest)
        unfinished.replace(path)
    except OSError:  # a full disk
        return None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
    return index


def _digest_of_rest(file: BinaryIO) -> bytes:
    digest = hashlib.new(_DIGEST)
    while chunk := file.read(2**20):
        digest.update(chunk)
    return digest.digest()


def _open_plain(path: Path) -> BinaryIO:
    """Open a plain file, and nothing that one would wait for.

    Raises:
        OSError: it is none, or cannot be opened.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a regular file")
    return file
