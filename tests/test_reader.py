"""Reading traces: whole ones, cut ones, broken ones, newer ones, and what is none."""

from __future__ import annotations

import gzip
import io
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvtrace import events as ev
from nvtrace.envelope import VERSION, Footer, Header, NewerTraceError, Unknown
from nvtrace.reader import UnreadableTraceError, read_trace
from support.examples import changed, example_trace

if TYPE_CHECKING:
    from pathlib import Path

    from nvtrace.envelope import Record

LINES = example_trace()
WHOLE = b"".join(LINES)
HEADER, EVENT, FOOTER = LINES[0], LINES[1], LINES[-1]
GZ = gzip.compress(WHOLE, mtime=0)


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


def test_a_trace_is_read_line_by_line() -> None:
    class Counting(io.BytesIO):
        num_reads = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            self.num_reads += 1
            return super().readline(-1 if size is None else size)

    file = Counting(WHOLE)
    records = read_trace(file)
    for number in range(1, 5):
        next(records)
        assert file.num_reads == number


def test_blank_lines_and_windows_line_endings_do_no_harm() -> None:
    records, warnings = read(b"\r\n".join([*(line.rstrip() for line in LINES), b"", b""]))
    assert (records, warnings) == read(WHOLE)


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
        changed(EVENT, phase="somewhere"),
        b'{"event":"ENGINE_ERROR\xff\xfe"}\n',
        b'{"event":"NEWER","text":"\xff\xfe"}\n',
        b"\x00\x00\x00\n",
    ],
)
@pytest.mark.parametrize("is_last", [False, True])
def test_a_broken_whole_line_is_an_error_that_names_it(line: bytes, *, is_last: bool) -> None:
    data = b"".join([*LINES[:4], line, *([] if is_last else LINES[4:])])
    seen: list[Record] = []
    with pytest.raises(UnreadableTraceError, match=r"^the trace: line 5 is no record") as told:
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
    with pytest.raises(UnreadableTraceError, match="line 2 is no record"):
        read(HEADER + line)


def test_a_second_header_is_an_error() -> None:
    with pytest.raises(UnreadableTraceError, match="line 3 is a second header"):
        read(HEADER + EVENT + HEADER)


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
        GZ,
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
