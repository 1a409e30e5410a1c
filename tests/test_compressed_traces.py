"""Reading compressed traces: whole, cut by a killed run, and damaged."""

from __future__ import annotations

import gzip
import random
import zlib
from typing import TYPE_CHECKING

import pytest
import zstandard

from nvtrace.reader import UnreadableTraceError, read_trace
from support.examples import changed, example_trace

if TYPE_CHECKING:
    from pathlib import Path

HEADER, *EVENTS, FOOTER = example_trace()
EVENT = EVENTS[0]
LINES = [HEADER, *(EVENTS * 5), FOOTER]
WHOLE = b"".join(LINES)


def flushed_often(ending: str) -> bytes:
    """The trace compressed as a run writes it: with a flush after every few lines."""
    if ending == ".gz":
        gz = zlib.compressobj(wbits=31)
        parts = [gz.compress(line) + gz.flush(zlib.Z_SYNC_FLUSH) for line in LINES]
        return b"".join([*parts, gz.flush()])
    zst = zstandard.ZstdCompressor().compressobj()
    flush = zstandard.COMPRESSOBJ_FLUSH_BLOCK
    parts = [zst.compress(line) + zst.flush(flush) for line in LINES]
    return b"".join([*parts, zst.flush()])


def decoded(ending: str, data: bytes) -> bytes:
    """All that the compression library itself can make of `data`."""
    if ending == ".gz":
        return zlib.decompressobj(wbits=31).decompress(data)
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("share", [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])
def test_a_cut_compressed_trace_gives_every_line_that_is_whole_in_it(
    tmp_path: Path, ending: str, share: float
) -> None:
    path = tmp_path / f"trace.jsonl{ending}"
    compressed = flushed_often(ending)
    compressed = compressed[: int(len(compressed) * share)]
    path.write_bytes(compressed)
    expected = decoded(ending, compressed).count(b"\n")
    assert expected > 1
    warnings: list[str] = []
    assert len(list(read_trace(path, warn=warnings.append))) == expected
    assert len(warnings) == 1


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_long_compressed_trace_is_read_to_its_last_whole_line(
    tmp_path: Path, ending: str
) -> None:
    """More than any buffer between the file and its lines."""
    path = tmp_path / f"trace.jsonl{ending}"
    lines = [HEADER, *(changed(EVENT, event_id=number) for number in range(1, 3001))]
    data = b"".join(lines)
    whole = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[ending](data)
    path.write_bytes(whole)
    assert len(list(read_trace(path))) == 3001
    path.write_bytes(whole[: len(whole) * 9 // 10])
    expected = decoded(ending, path.read_bytes()).count(b"\n")
    assert len(list(read_trace(path))) == expected > 1


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.8])
def test_a_damaged_compressed_trace_is_an_error_and_not_a_cut_one(
    tmp_path: Path, ending: str, share: float
) -> None:
    noise = random.Random(0)
    lines = [HEADER, *(changed(EVENT, model=noise.randbytes(100).hex()) for _ in range(1000))]
    zst = zstandard.ZstdCompressor(write_checksum=True)  # as gzip always does
    compress = {".gz": gzip.compress, ".zst": zst.compress}[ending]
    compressed = bytearray(compress(b"".join(lines)))
    damaged = int(len(compressed) * share)
    compressed[damaged : damaged + 40] = b"\xff" * 40
    path = tmp_path / f"trace.jsonl{ending}"
    path.write_bytes(compressed)
    with pytest.raises(UnreadableTraceError):
        list(read_trace(path))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_file_that_is_not_what_its_ending_says_is_called_so(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"trace.jsonl{ending}"
    path.write_bytes(WHOLE)
    with pytest.raises(UnreadableTraceError, match="cannot be decompressed"):
        list(read_trace(path))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_an_empty_compressed_file_is_said_to_be_empty(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"trace.jsonl{ending}"
    path.write_bytes(b"")
    with pytest.raises(UnreadableTraceError, match="is empty"):
        list(read_trace(path))
