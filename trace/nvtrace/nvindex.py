"""The index file beside a large trace: snapshots of the state, and the trace's offset of each.

    digest of the rest | compressed snapshots | SnapshotIndex as JSON | offset of that JSON

A file whose digest is wrong, or that is not a regular file, is not used. `snapshots.py` fills it.
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
    """Where a fold can begin. The first entry is the trace's start and has no snapshot.

    Attributes:
        step: the step before; 0 at the trace's start.
        offset: the byte of the trace to go on from.
        place, num_bytes: offset and size of the snapshot in the index file.
    """

    step: _Number
    offset: _Number
    place: _Number = 0
    num_bytes: _Number = 0


class SnapshotIndex(msgspec.Struct, frozen=True):
    """The entries of an index, and the size and modification time of its trace."""

    size: int
    mtime_ns: int
    last_step: _Number
    entries: Annotated[list[SnapshotEntry], Meta(min_length=1)]
    version: int = _VERSION

    def fits(self, trace: Path) -> bool:
        """Is this the index of the trace as it is now?"""
        status = trace.stat()
        key = (_VERSION, status.st_size, status.st_mtime_ns)
        return (self.version, self.size, self.mtime_ns) == key


def pack(snapshot: bytes, file: BinaryIO, step: int, offset: int) -> SnapshotEntry:
    """Append a snapshot to an index file."""
    packed = zlib.compress(snapshot, level=1)
    place = file.tell()
    file.write(packed)
    return SnapshotEntry(step, offset, place, len(packed))


def unpack(path: Path, entry: SnapshotEntry, most_bytes: int) -> bytes:
    """Read a snapshot from an index file.

    Raises:
        OSError, zlib.error: the file was changed after its SnapshotIndex was read.
    """
    with _open_plain(path) as file:
        file.seek(entry.place)
        return zlib.decompressobj().decompress(file.read(entry.num_bytes), most_bytes)


def read_index(path: Path) -> SnapshotIndex | None:
    """Read an index file; None if there is none, or if it is damaged."""
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
    """Write an index file; a regular file of that name is replaced.

    Args:
        path: of the index.
        fill: writes the snapshots into the file, and returns their SnapshotIndex.

    Returns:
        What `fill` returned; None if the file cannot be written.
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
    """Open a regular file; opening a pipe or a device could block.

    Raises:
        OSError: it is not a regular file, or cannot be opened.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a regular file")
    return file
