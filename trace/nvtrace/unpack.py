"""Unpack: decompress a trace; its first bytes, not its file name, show how it is compressed.

    gzip members | zstd frames, skippable ones too | text   --->   the trace's bytes

All members and frames of a file are read, one after another, as by `gunzip` and `zstd -d`. A file
that was cut off is read to its last byte, and a damaged one up to the damage.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import zstandard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MOST_TIMES = 250  # a trace grows less when it is decompressed; the most seen in tests was 76 times
HARMLESS_BYTES = 4 * 2**20  # no limit for files that stay below this size

_GZIP, _ZSTD, _SKIPPABLE = "gzip", "zstd", "skippable"
MAGIC = {  # the first bytes of a compressed file
    b"\x1f\x8b": _GZIP,
    b"\x28\xb5\x2f\xfd": _ZSTD,
    **{bytes([first]) + b"\x2a\x4d\x18": _SKIPPABLE for first in range(0x50, 0x60)},
}
_SKIPPABLE_HEAD_BYTES = 8  # the magic, and the number of bytes that follow
_WITH_GZIP_HEADER = 31  # zlib's wbits for its largest window, with a gzip header
_CHUNK_BYTES = 32 * 1024
# A decompressor gets small pieces, because its output may be 32,000 times as large, and because its
# output of a piece is lost if the piece is damaged.
_PIECE_BYTES = 128


class UnpackError(ValueError):
    """Compressed data cannot be decompressed any further."""


class BombError(ValueError):
    """Decompressed, it becomes so much larger that it cannot be a trace."""


def is_packed(path: Path) -> bool:
    """Is this a compressed file? False if it cannot be read."""
    try:
        with path.open("rb") as file:
            return _Source(file.read).kind() is not None
    except OSError:
        return False


def unpacked(read: Callable[[int], bytes], num_bytes: int = _CHUNK_BYTES) -> Iterator[bytes]:
    """Yield a trace's bytes, decompressed, as soon as they can be read.

    Args:
        read: takes a number of bytes, returns at most that many; b"" at the end.
        num_bytes: maximum number to read, and to yield, at once.

    Raises:
        UnpackError: it is damaged after what was yielded, or was cut off before its first data.
        BombError: see there.
    """
    source = _Source(read, num_bytes)
    kind = source.kind()
    if kind is None:
        if source.data:
            yield source.data
        while chunk := read(num_bytes):
            yield chunk
        return
    num_unpacked = 0
    while kind is not None:
        for chunk in source.member(kind):
            num_unpacked += len(chunk)
            if num_unpacked > max(HARMLESS_BYTES, MOST_TIMES * source.num_bytes):
                raise BombError(
                    f"becomes more than {MOST_TIMES} times larger when it is unpacked, "
                    "which no trace does. If it is a trace, unpack it yourself first"
                )
            for start in range(0, len(chunk), num_bytes):
                yield chunk[start : start + num_bytes]
        kind = source.kind()
    if source.data and not source.is_cut:
        raise UnpackError("what follows is neither gzip nor zstd")
    if source.is_cut and not num_unpacked:
        raise UnpackError("it was cut off before its first data")


class _Source:
    """Compressed input.

    Attributes:
        data: what was read and not used yet.
        num_bytes: read so far.
        is_cut: does it end within a member, or within the magic of one?
    """

    def __init__(self, read: Callable[[int], bytes], chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._read = read
        self._chunk_bytes = chunk_bytes
        self.data = b""
        self.num_bytes = 0
        self.is_cut = False

    def _more(self) -> bool:
        """Read some more. Returns False at the end."""
        chunk = self._read(self._chunk_bytes)
        self.data += chunk
        self.num_bytes += len(chunk)
        return bool(chunk)

    def kind(self) -> str | None:
        """The kind of member that begins here; None if it is not compressed, or at the end."""
        while any(magic != self.data and magic.startswith(self.data) for magic in MAGIC):
            if not self._more():
                self.is_cut |= bool(self.data)
                return None
        return next((kind for magic, kind in MAGIC.items() if self.data.startswith(magic)), None)

    def member(self, kind: str) -> Iterator[bytes]:
        """Decompress the member, or frame, that begins here."""
        if kind == _SKIPPABLE:
            self._skip()
        elif kind == _ZSTD:
            yield from self._decompressed(zstandard.ZstdDecompressor().decompressobj())
        else:
            yield from self._decompressed(zlib.decompressobj(wbits=_WITH_GZIP_HEADER))
            self.data = self.data.lstrip(b"\0")
            while not self.data and self._more():
                self.data = self.data.lstrip(b"\0")  # gzip's padding

    def _skip(self) -> None:
        while len(self.data) < _SKIPPABLE_HEAD_BYTES and self._more():
            pass
        num_left = int.from_bytes(self.data[4:_SKIPPABLE_HEAD_BYTES], "little")
        num_left += _SKIPPABLE_HEAD_BYTES
        while num_left > len(self.data):
            num_left -= len(self.data)
            self.data = b""
            if not self._more():
                self.is_cut = True
                return
        self.data = self.data[num_left:]

    def _decompressed(self, member: Any) -> Iterator[bytes]:  # noqa: ANN401 - zlib's or zstandard's
        while not member.eof:
            if not self.data and not self._more():
                self.is_cut = True
                return
            data, self.data = self.data, b""
            unpacked = bytearray()
            for start in range(0, len(data), _PIECE_BYTES):
                try:
                    unpacked += member.decompress(data[start : start + _PIECE_BYTES])
                except (zlib.error, zstandard.ZstdError) as error:
                    yield bytes(unpacked)
                    raise UnpackError(str(error)) from error
                if member.eof:
                    self.data = member.unused_data + data[start + _PIECE_BYTES :]
                    break
                if len(unpacked) >= self._chunk_bytes:
                    yield bytes(unpacked)
                    unpacked.clear()
            yield bytes(unpacked)
