"""Reading traces: whole ones, cut ones, broken ones, newer ones, and what is none."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import sys
import zipfile
from typing import TYPE_CHECKING, BinaryIO, cast

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from nvtrace import events as ev
from nvtrace import reader
from nvtrace.envelope import VERSION, Footer, Header, HeaderFacts, NewerTraceError, Unknown, decode
from nvtrace.reader import UnreadableTraceError, read_blocks, read_trace
from support.examples import changed, example_trace, line_of
from support.recording import BUSY, Recording

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nvtrace.envelope import Record

    Written = Header | Footer | ev.Event

LINES = example_trace()
WHOLE = b"".join(LINES)
HEADER, EVENT, FOOTER = LINES[0], LINES[1], LINES[-1]
GZ = gzip.compress(WHOLE, mtime=0)


LIMITS = ("tp_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size")


def _zipped(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("trace.jsonl", data)
    return file.getvalue()


def read(data: bytes) -> tuple[list[Record], list[str]]:
    """The records of a trace, and the warnings."""
    warnings: list[str] = []
    return list(read_trace(io.BytesIO(data), warn=warnings.append)), warnings


def test_a_whole_trace_is_a_header_and_events_and_a_footer_without_a_warning() -> None:
    records, warnings = read(WHOLE)
    assert warnings == []
    assert len(records) == len(LINES)
    assert isinstance(records[0], Header)
    assert all(isinstance(record, ev.Event) for record in records[1:-1])
    assert isinstance(records[-1], Footer)


def test_a_record_is_given_as_soon_as_its_line_is_there() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)  # to wait for more would be to find the end
    with os.fdopen(reading, "rb") as file, os.fdopen(writing, "wb", buffering=0) as pipe:
        records = read_trace(file)
        for line in LINES:
            pipe.write(line)
            assert line_of(cast("Written", next(records))) == line
        assert list(records) == []


def test_blank_lines_and_windows_line_endings_do_no_harm() -> None:
    records, warnings = read(b"\r\n".join([*(line.rstrip() for line in LINES), b"", b""]))
    assert (records, warnings) == read(WHOLE)


# -- many lines at once ----------------------------------------------------------------------------

MANY = [changed(line, event_id=number) for number, line in enumerate(LINES[1:-1] * 2, 1)]
LONG = [HEADER, *MANY, changed(FOOTER, event_id=len(MANY) + 1)]
ODD_LINES = [
    b"\n",
    b" \t\r\n",
    b"no json\n",
    b"[1,2]\n",
    b"{}\n",
    HEADER,
    FOOTER,
    EVENT.rstrip() + b"\r\n",
    EVENT.replace(b",", b", "),
    EVENT.replace(b",", b"\n,", 1),
    EVENT.rstrip() + EVENT,
    EVENT.rstrip() + b"," + EVENT,
    EVENT.rstrip(),
    changed(EVENT, event="NEWER"),
    changed(EVENT, event="NEWER", event_id="seven"),
    changed(EVENT, event_id=10**30),
    changed(EVENT, event_id=-3),
    changed(EVENT, event_id=1.5),
    changed(EVENT, ts_ns=None),
    changed(EVENT, newer_field={"deep": [[[1]]]}),
    b'{"event":"ENGINE_ERROR\xff"}\n',
    b"[" * 2000 + b"\n",
    b"\xef\xbb\xbf" + EVENT,
    EVENT.decode().encode("utf-16"),
]


@st.composite
def harmed_traces(draw: st.DrawFn) -> bytes:
    """A trace with a few lines taken out, repeated, swapped, put in or cut."""
    lines = list(LONG)
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(["drop", "repeat", "swap", "insert", "cut", "flip"])):
            case "drop" if len(lines) > 1:
                del lines[place]
            case "repeat":
                lines.insert(place, lines[place])
            case "swap":
                other = draw(st.integers(0, len(lines) - 1))
                lines[place], lines[other] = lines[other], lines[place]
            case "insert":
                lines.insert(place, draw(st.sampled_from(ODD_LINES)))
            case "cut":
                lines[place] = lines[place][: draw(st.integers(0, len(lines[place])))]
            case "flip":
                where = draw(st.integers(0, max(len(lines[place]) - 1, 0)))
                byte = bytes([draw(st.integers(0, 255))])
                lines[place] = lines[place][:where] + byte + lines[place][where + 1 :]
    data = b"".join(lines)
    return data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data


def told(data: bytes) -> tuple[list[Record], list[str], str]:
    """All that reading says: records, warnings, the error."""
    records: list[Record] = []
    warnings: list[str] = []
    try:
        records.extend(read_trace(io.BytesIO(data), warn=warnings.append))
    except (UnreadableTraceError, NewerTraceError) as error:
        return records, warnings, f"{type(error).__name__}: {error}"
    return records, warnings, ""


@given(data=harmed_traces(), block_bytes=st.sampled_from([1, 300, 2000, 10**6]))
def test_many_lines_at_once_say_what_they_say_one_by_one(data: bytes, block_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_BLOCK_BYTES", block_bytes)
        at_once = told(data)
        patch.setattr(reader, "_all_at_once", lambda _lines: None)
        assert at_once == told(data)
        patch.setattr(reader, "_BLOCK_BYTES", 64)
        assert at_once == told(data)


def test_a_plain_block_is_decoded_at_once() -> None:
    looked_at: list[bytes] = []

    def slowly(line: bytes) -> Record:
        looked_at.append(line)
        return decode(line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "decode", slowly)
        patch.setattr(reader, "_BLOCK_BYTES", len(HEADER))
        assert len(read(b"".join(LONG))[0]) == len(LONG)
    assert looked_at == [HEADER]


def test_blocks_hold_the_records_of_a_trace_in_their_order() -> None:
    blocks = list(read_blocks(io.BytesIO(b"".join(LONG))))
    assert [record for block in blocks for record in block] == read(b"".join(LONG))[0]
    assert all(blocks)


def test_a_line_without_an_end_is_an_error_before_it_fills_the_memory() -> None:
    class Endless(io.RawIOBase):
        num_bytes = 0

        def read(self, size: int = -1, /) -> bytes:
            self.num_bytes += size
            return HEADER if self.num_bytes == size else b" " * size

    endless = Endless()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "MAX_LINE_BYTES", 10**6)
        with pytest.raises(UnreadableTraceError, match="line 2 is longer than any record"):
            list(read_trace(cast("BinaryIO", endless)))
    assert endless.num_bytes < 2 * 10**6


# -- cut off ---------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(cut=st.integers(len(HEADER), len(WHOLE) - 1))
def test_a_trace_cut_anywhere_gives_its_whole_lines_and_one_warning(cut: int) -> None:
    data = WHOLE[:cut]
    records, warnings = read(data)
    is_between_lines = data.endswith(b"\n")
    lacks_only_a_newline = data + b"\n" in (b"".join(LINES[:n]) for n in range(len(LINES) + 1))
    assert len(records) == data.count(b"\n") + lacks_only_a_newline
    if data + b"\n" == WHOLE:
        assert warnings == []
    else:
        (warning,) = warnings
        expected = "no footer" if is_between_lines or lacks_only_a_newline else "is cut"
        assert expected in warning


def test_the_warning_about_a_cut_line_names_the_line() -> None:
    records, warnings = read(b"".join(LINES[:4]) + b'{"event":"SCHED')
    assert len(records) == 4
    assert warnings == ["the trace: the last line (5) is cut; everything before it was read"]


@pytest.mark.parametrize("behind", [[EVENT], [EVENT, FOOTER], [EVENT] * 3000])
def test_lines_behind_the_footer_are_said_to_be_there(behind: list[bytes]) -> None:
    records, warnings = read(b"".join([*LINES, *behind]))
    assert len(records) == len(LINES) + len(behind)
    assert [warning for warning in warnings if "footer" in warning] == [
        f"the trace: {len(behind)} lines come after the footer, which must be the last"
    ]


@pytest.mark.parametrize("rubbish", [b"rubbish", b"{", b"\0" * 512, EVENT[:-9], b"\xff\xfe"])
@pytest.mark.parametrize("behind", [[], [EVENT], [EVENT] * 3000])
def test_rubbish_behind_the_footer_was_not_cut_off(rubbish: bytes, behind: list[bytes]) -> None:
    records, warnings = read(b"".join([*LINES, *behind, rubbish]))
    assert len(records) == len(LINES) + len(behind)
    assert [warning for warning in warnings if "footer" in warning or "cut" in warning] == [
        f"the trace: {len(behind) + 1} lines come after the footer, which must be the last"
    ]


def test_a_missing_footer_is_a_warning() -> None:
    records, warnings = read(b"".join(LINES[:-1]))
    assert len(records) == len(LINES) - 1
    assert len(warnings) == 1
    assert "no footer" in warnings[0]


def test_warnings_can_be_left_unheard() -> None:
    assert len(list(read_trace(io.BytesIO(HEADER)))) == 1


# -- broken ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b"no json at all\n",
        b'{"event":"SCHED\n',
        b"[1, 2]\n",
        b"17\n",
        b"null\n",
        b"{}\n",
        b'{"event":3}\n',
        b'{"event":"STEP_END"}\n',
        changed(EVENT, event_id="one"),
        changed(EVENT, phase=7),
        b'{"event":"ENGINE_ERROR\xff\xfe"}\n',
        b'{"event":"NEWER","text":"\xff\xfe"}\n',
        b"\x00\x00\x00\n",
    ],
)
@pytest.mark.parametrize("is_last", [False, True])
def test_a_broken_whole_line_is_an_error_that_names_it(line: bytes, *, is_last: bool) -> None:
    data = b"".join([*LINES[:4], line, *([] if is_last else LINES[4:])])
    seen: list[Record] = []
    with pytest.raises(UnreadableTraceError, match=r"^the trace: line 5 is not a record") as told:
        seen += read_trace(io.BytesIO(data), warn=pytest.fail)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 400


@pytest.mark.parametrize(
    "line",
    [
        b'{"event":"NEWER","a":' + b"[" * 10**5 + b"]" * 10**5 + b"}\n",
        EVENT[:-2] + b',"newer":' + b"[" * 10**5 + b"]" * 10**5 + b"}\n",
        b"[" * 10**5 + b"\n",
    ],
)
def test_a_line_too_deep_to_read_is_a_broken_line(line: bytes) -> None:
    with pytest.raises(UnreadableTraceError, match="line 2 is not a record"):
        read(HEADER + line)


def test_a_second_header_is_an_error() -> None:
    with pytest.raises(UnreadableTraceError, match="line 3 is a second header"):
        read(HEADER + EVENT + HEADER)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 10**8), (0, 0), (2, 2), (-1, 2)])
def test_a_rank_of_no_world_is_an_error(rank: int, world_size: int) -> None:
    """Else the files of a hundred million ranks would be looked for."""
    header = json.loads(HEADER) | {"rank": rank, "world_size": world_size}
    with pytest.raises(
        UnreadableTraceError, match=f"has rank {rank} of {world_size}, which no run"
    ):
        read(json.dumps(header).encode() + b"\n" + EVENT)


BOUNDED = [
    (part.name, field)
    for part in msgspec.structs.fields(HeaderFacts)
    for field, kind in ev.field_types(part.type).items()
    if kind == int | None
]
WRONG_NUMBERS = [-1, 0.5, 1e308, 2**63, 10**400, -(2**70), "8", "x" * 1000, [], [8], {}, True]


@pytest.mark.parametrize("wrong", WRONG_NUMBERS, ids=lambda value: str(value)[:20])
def test_a_header_whose_numbers_are_none_is_refused_before_anybody_counts_with_them(
    wrong: object,
) -> None:
    assert ("model", "vocab_size") in BOUNDED
    for part, field in BOUNDED:
        header = json.loads(HEADER)
        header[part] = {field: wrong}
        with pytest.raises(UnreadableTraceError, match=r"not a valid header \(") as told:
            read(json.dumps(header).encode() + b"\n" + EVENT)
        assert len(str(told.value)) < 400
        header[part] = {field: None}  # is not known
        assert len(read(json.dumps(header).encode() + b"\n" + EVENT)[0]) == 2


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_header_tells_of_counts_that_a_model_can_have(field: str) -> None:
    for wrong in (0, 2**31, 2**40):
        with pytest.raises(UnreadableTraceError, match="not a valid header"):
            read(changed(HEADER, model={field: wrong, "head_dim": 2**30}))


@pytest.mark.parametrize(
    ("tag", "field", "wrong"),
    [
        *(("ENGINE_INIT", name, wrong) for wrong in (0, -1, -(2**63), 2**31) for name in LIMITS),
        ("ENGINE_READY", "num_kvcache_blocks", -1),
        ("ENGINE_READY", "num_kvcache_blocks", 2**24 + 1),
        ("KV_BUDGET_ESTIMATE", "utilization", 1e308),
    ],
)
@pytest.mark.parametrize("num_before", [0, 50])
def test_an_event_with_a_number_that_none_can_have_is_no_record(
    tag: str, field: str, wrong: object, num_before: int
) -> None:
    line = next((line for line in LINES if f'"event":"{tag}"'.encode() in line), EVENT)
    line = changed(line, event=tag, **{field: wrong})
    told = f"line {num_before + 2} is not a record"
    with pytest.raises(UnreadableTraceError, match=told):
        read(b"".join([HEADER, *[EVENT] * num_before, line, EVENT]))


def test_a_number_of_64_bits_is_one() -> None:
    event = changed(EVENT, seed=2**64 - 1, ts_ns=-(2**63))
    assert read(HEADER + event)[0][1] == decode(event)


def test_records_before_a_broken_line_have_been_given() -> None:
    records = read_trace(io.BytesIO(HEADER + EVENT + b"oops\n"))
    assert isinstance(next(records), Header)
    assert isinstance(next(records), ev.EngineInit)
    with pytest.raises(UnreadableTraceError):
        next(records)


# -- no trace --------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\n\n  \n"])
def test_an_empty_file_is_said_to_be_empty(data: bytes) -> None:
    with pytest.raises(UnreadableTraceError, match="is empty"):
        read(data)


@pytest.mark.parametrize(
    "data",
    [
        EVENT + FOOTER,
        FOOTER,
        b'{"event":"NEWER"}\n',
        b'{"some":"json"}\n',
        b"plain text\n",
        b"plain text",
        HEADER[:100],
        changed(HEADER, schema="other"),
        changed(HEADER, version="1.0"),
        b"\x89PNG\r\n\x1a\n",
    ],
)
def test_a_file_without_a_header_is_no_trace(data: bytes) -> None:
    with pytest.raises(UnreadableTraceError, match="is not an nvtrace trace"):
        read(data)


def test_a_missing_file_and_a_folder_are_called_so(tmp_path: Path) -> None:
    with pytest.raises(UnreadableTraceError, match="no such file"):
        list(read_trace(tmp_path / "none.jsonl"))
    with pytest.raises(UnreadableTraceError, match="is a folder"):
        list(read_trace(tmp_path))


def test_the_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b"")
    with pytest.raises(UnreadableTraceError, match=r"mine\.jsonl is empty"):
        list(read_trace(str(path)))


def test_a_dash_is_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(WHOLE)))
    assert len(list(read_trace("-", warn=pytest.fail))) == len(LINES)


@pytest.mark.parametrize(
    "encoding",
    [*("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"), *("utf-32", "utf-32-le", "utf-32-be")],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_another_encoding_is_named(encoding: str, mark: str) -> None:
    told = rf"not a header: it is {encoding[:6].upper().rstrip('-')}\b.*; save it as UTF-8"
    with pytest.raises(UnreadableTraceError, match=told):
        read((mark + WHOLE.decode()).encode(encoding))


@pytest.mark.parametrize(
    ("pack", "told"), [(bz2.compress, "bzip2"), (lzma.compress, "xz"), (_zipped, "a zip file")]
)
def test_another_packer_is_named(pack: Callable[[bytes], bytes], told: str) -> None:
    with pytest.raises(UnreadableTraceError, match=rf"not a header: it is .*{told}.*: unpack it"):
        read(pack(WHOLE))


def test_blank_lines_before_the_header_do_no_harm() -> None:
    assert read(b"\n \r\n" + WHOLE) == read(WHOLE)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_compressed_trace_that_is_cut_in_its_first_block_is_not_called_empty(
    tmp_path: Path, ending: str
) -> None:
    path = tmp_path / f"trace.jsonl{ending}"
    path.write_bytes((GZ if ending == ".gz" else zstandard.compress(WHOLE))[:40])
    with pytest.raises(UnreadableTraceError, match="cannot be decompressed"):
        list(read_trace(path))


# -- other versions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        changed(HEADER, version=[VERSION[0] + 1, 4]),
        b'{"event":"TRACE_HEADER","version":[2,4],"nothing":"else is as we know it"}\n',
    ],
)
def test_a_newer_major_version_is_refused_before_anything_else(header: bytes) -> None:
    with pytest.raises(NewerTraceError, match=r"format version 2\.4.* reads up to 1\.x"):
        read(header + b"whatever\n")


def test_a_newer_minor_version_is_read_and_what_is_new_is_counted() -> None:
    header = changed(HEADER, version=[VERSION[0], VERSION[1] + 7], newer_field=1)
    event = changed(EVENT, newer_field=[1, 2])
    moons = [changed(EVENT, event="MOON", size=size) for size in (1, 2)]
    sun = changed(EVENT, event="SUN")
    records, warnings = read(b"".join([header, event, moons[0], sun, moons[1], FOOTER]))
    assert isinstance(records[1], ev.EngineInit)
    assert [type(record) for record in records[2:5]] == [Unknown] * 3
    assert isinstance(records[2], Unknown)
    assert (records[2].event, records[2].fields["size"]) == ("MOON", 1)
    assert isinstance(records[-1], Footer)
    assert len(warnings) == 2  # and the footer's number speaks of events that are not there
    assert "MOON x 2, SUN x 1" in warnings[0]


def test_lines_that_are_missing_from_the_middle_are_noticed() -> None:
    lines = Recording(BUSY).data.splitlines(keepends=True)
    warnings: list[str] = []
    list(read_trace(io.BytesIO(b"".join(lines[:20] + lines[27:])), warn=warnings.append))
    assert warnings == ["the trace: 7 events are missing, according to the event ids"]
