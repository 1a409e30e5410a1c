"""Reading compressed traces: whole, cut by a killed run, and damaged."""

from __future__ import annotations

import gzip
import io
import random
import re
import sys
import zlib
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import zstandard

from nvtrace import reader
from nvtrace.follow import follow_trace
from nvtrace.reader import UnreadableTraceError, read_trace
from nvtrace.unpack import HARMLESS_BYTES, MOST_TIMES, BombError, UnpackError, is_packed, unpacked
from nvtrace.validate import Validator, validate
from support.examples import changed, example_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nvtrace.envelope import Record

HEADER, *EVENTS, FOOTER = example_trace()
EVENT = EVENTS[0]
LINES = [HEADER]
LINES += [changed(event, event_id=number) for number, event in enumerate(EVENTS * 5, 1)]
LINES += [changed(FOOTER, event_id=len(LINES))]
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


# -- what it is, and not what it is called ---------------------------------------------------------

PACK: dict[str, Callable[[bytes], bytes]] = {
    "text": bytes,
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
}


@pytest.mark.parametrize("name", ["trace", "trace.jsonl", "trace.jsonl.gz", "TRACE.ZST", "a.zst.1"])
@pytest.mark.parametrize("pack", PACK.values(), ids=PACK)
def test_a_trace_is_read_whatever_its_name_is(
    name: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(pack(WHOLE))
    expected = list(read_trace(io.BytesIO(WHOLE)))
    assert list(read_trace(path, warn=pytest.fail)) == expected
    assert list(read_trace(io.BytesIO(pack(WHOLE)), warn=pytest.fail)) == expected
    assert list(follow_trace(path, pause=pytest.fail, missing=pytest.fail)) == expected
    assert is_packed(path) == (pack is not bytes)


@pytest.mark.parametrize("pack", PACK.values(), ids=PACK)
def test_standard_input_is_looked_at_as_well_and_called_so(
    pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_footer = b"".join(LINES[:-1])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(pack(without_footer))))
    warnings: list[str] = []
    assert len(list(read_trace("-", warn=warnings.append))) == len(LINES) - 1
    assert warnings
    assert all(warning.startswith("standard input") for warning in warnings)


# -- members and frames ----------------------------------------------------------------------------

PARTS = [b"".join(LINES[:5]), b"".join(LINES[5:9]), b"".join(LINES[9:])]
SKIPPABLE = b"\x5a\x2a\x4d\x18" + (9).to_bytes(4, "little") + b"\x1f\x8bskipped"
ZST_WITH_CHECKSUM = zstandard.ZstdCompressor(write_checksum=True).compress
MEMBERS = [*map(gzip.compress, PARTS)]
FRAMES = [*map(zstandard.compress, PARTS)]
SEVERAL = {
    "members": b"".join(MEMBERS),
    "members with zeros behind": bytes(1000).join([*MEMBERS, b""]),
    "frames": b"".join(FRAMES),
    "frames with checksums": b"".join(map(ZST_WITH_CHECKSUM, PARTS)),
    "frames, skippable ones between": SKIPPABLE.join([b"", *FRAMES, b""]),
    "an empty frame first": b"".join([zstandard.compress(b""), *FRAMES]),
    "members and frames": b"".join([MEMBERS[0], FRAMES[1], MEMBERS[2]]),
}


@pytest.mark.parametrize("data", SEVERAL.values(), ids=SEVERAL)
def test_all_members_and_frames_are_read(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(data)
    expected = list(read_trace(io.BytesIO(WHOLE)))
    assert list(read_trace(path, warn=pytest.fail)) == expected
    assert list(follow_trace(path, pause=pytest.fail, missing=pytest.fail)) == expected
    validator = Validator()
    deque(validate(path, validator, warn=pytest.fail), maxlen=0)
    assert validator.num_lines == len(expected)


@pytest.mark.parametrize("num_bytes", [1, 3, 128, 5000])
@pytest.mark.parametrize("data", SEVERAL.values(), ids=SEVERAL)
def test_it_does_not_matter_in_which_pieces_they_come(data: bytes, num_bytes: int) -> None:
    file = io.BytesIO(data)
    assert b"".join(unpacked(lambda size: file.read(min(size, num_bytes)))) == WHOLE


@pytest.mark.parametrize("data", SEVERAL.values(), ids=SEVERAL)
def test_members_cut_anywhere_give_what_is_whole_in_them(data: bytes, tmp_path: Path) -> None:
    for length in range(4, len(data), 13):
        with suppress(UnpackError):  # nothing came out of it
            assert WHOLE.startswith(b"".join(unpacked(io.BytesIO(data[:length]).read)))
    path = tmp_path / "cut.jsonl.zst"
    path.write_bytes(data[:-30].rstrip(b"\0")[:-30])
    warnings: list[str] = []
    num_records = len(list(read_trace(path, warn=warnings.append)))
    assert num_records >= PARTS[0].count(b"\n")
    assert all(warning.startswith(str(path)) for warning in warnings)
    assert warnings


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_what_precedes_a_rubbish_behind_the_end_is_read(
    pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl.zst"
    path.write_bytes(pack(b"".join(PARTS[:2])) + pack(PARTS[2]) + b"rubbish")
    records = read_trace(path)
    assert len(list(islice(records, len(LINES)))) == len(LINES)
    told = f"{path} is damaged after line {len(LINES)} (what follows is neither gzip nor zstd)"
    with pytest.raises(UnreadableTraceError, match=f"^{re.escape(told)}$"):
        next(records)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_what_precedes_a_damage_is_read(ending: str, tmp_path: Path) -> None:
    data = bytearray(flushed_often(ending))
    place = len(data) * 3 // 4
    whole = decoded(ending, bytes(data[: place - 128])).count(b"\n")
    data[place:] = b"\xff" * (len(data) - place)
    (tmp_path / "trace").write_bytes(data)
    seen: list[Record] = []
    with pytest.raises(UnreadableTraceError, match="trace is damaged after line"):
        seen += _noting(read_trace(tmp_path / "trace"), seen)
    assert len(seen) >= whole > 100


def _noting(records: Iterator[Record], seen: list[Record]) -> Iterator[Record]:
    for record in records:
        seen.append(record)
        yield record


# -- bombs -----------------------------------------------------------------------------------------

ZEROS, NEWLINES, EVENTS_AGAIN = b"\0", b"\n", b'{"event":"NEW"}\n'


@pytest.mark.parametrize("what", [ZEROS, NEWLINES, EVENTS_AGAIN], ids=["0", "lines", "events"])
@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_what_becomes_much_larger_than_a_trace_can_is_left_off(
    pack: Callable[[bytes], bytes], what: bytes, tmp_path: Path
) -> None:
    bomb = pack(HEADER + what * (16 * 2**20 // len(what)))
    sizes: list[int] = []
    with pytest.raises(BombError):
        sizes.extend(map(len, unpacked(io.BytesIO(bomb).read)))
    assert max(sizes) <= 32 * 1024
    assert sum(sizes) <= max(HARMLESS_BYTES, MOST_TIMES * len(bomb)) < 15 * 2**20
    path = tmp_path / "bomb"
    path.write_bytes(bomb)
    for records in (
        read_trace(path),
        follow_trace(path, pause=pytest.fail, missing=pytest.fail),
        validate(path, Validator(), warn=pytest.fail),
    ):
        with pytest.raises(UnreadableTraceError, match="bomb becomes more than 250 times larger"):
            deque(records, maxlen=0)


def test_blank_lines_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    num_lines = 0

    def counting(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - what it stands for takes
        nonlocal num_lines
        num_lines += len(arguments[0])
        return one_by_one(*arguments, **options)

    one_by_one = reader._one_by_one
    monkeypatch.setattr(reader, "_one_by_one", counting)
    data = b"".join([HEADER, b"\n" * 10**6, *LINES[1:]])
    assert len(list(read_trace(io.BytesIO(data), warn=pytest.fail))) == len(LINES)
    assert num_lines < 3 * 32 * 1024
    with pytest.raises(UnreadableTraceError, match="line 1000002 is not a record"):
        list(read_trace(io.BytesIO(HEADER + b"\n" * 10**6 + b"no record\n")))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_an_empty_compressed_file_is_said_to_be_empty(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"trace.jsonl{ending}"
    path.write_bytes(b"")
    with pytest.raises(UnreadableTraceError, match="is empty"):
        list(read_trace(path))
