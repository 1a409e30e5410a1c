"""nvtrace validate and nvtrace schema: every line, every rule, every line number."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from typing import TYPE_CHECKING, Any

import pytest
import zstandard
from hypothesis import given, settings

from nvtrace.validate import Fault, Validator, validate
from support.cli import ROOT, call, spawn
from support.cli_traces import crowded_run, write_trace
from support.recording import Recording
from support.workload import Workload, workloads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Lines = list[dict[str, Any]]
LAST = -1  # for the number of the last line, however many there are


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("trace") / "trace.jsonl", crowded_run())


@pytest.fixture
def lines(trace: Path) -> Lines:
    return [json.loads(line) for line in trace.read_text("utf-8").splitlines()]


def faults_of(data: bytes) -> list[Fault]:
    validator = Validator()
    lines = enumerate(data.splitlines(), start=1)
    return [fault for number, line in lines for fault in validator.take(number, line)]


def dump(lines: Lines) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def places(faults: list[Fault]) -> list[tuple[int, str]]:
    return [(fault.line, fault.code) for fault in faults]


@settings(max_examples=25)
@given(workloads())
def test_whatever_the_engine_writes_is_valid(workload: Workload) -> None:
    assert faults_of(Recording(workload).data) == []


def drop(name: str) -> Callable[[Lines], object]:
    return lambda lines: lines[20].pop(name)


def put(number: int, **fields: object) -> Callable[[Lines], object]:
    """Change the line of this number; the last one's is LAST."""
    return lambda lines: lines[number if number == LAST else number - 1].update(fields)


def append_a_footer(lines: Lines) -> None:
    lines.append(lines[-1] | {"event_id": lines[-1]["event_id"] + 1})


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (drop("ts_ns"), [(21, "not_the_schema")]),
        (drop("event"), [(21, "no_event")]),
        (put(21, step="five"), [(21, "not_the_schema")]),
        (put(21, phase="lunch"), []),  # a code may be any word
        (put(21, phase=7), [(21, "not_the_schema")]),
        (put(21, ts_ns=10**400), [(21, "not_the_schema")]),
        (put(21, newer=[2**64]), []),  # a field of a newer version
        (put(21, event="NEWER", amount=-(2**63) - 1), [(21, "not_the_schema")]),
        (put(21, event_id=7), [(21, "event_id"), (22, "event_id")]),
        (put(21, ts_ns=1), [(21, "ts_back")]),
        (lambda lines: lines.insert(20, lines[0]), [(21, "second_header")]),
        (lambda lines: lines.pop(20), [(21, "event_id"), (LAST, "num_events")]),
        (lambda lines: lines.pop(0), [(1, "no_header")]),
        (put(1, schema="other"), [(1, "other_schema")]),
        (put(LAST, num_events=9), [(LAST, "num_events")]),
        (append_a_footer, [(LAST, "after_footer")]),
        (put(250, step=1), [(250, "step_back")]),
        (put(250, step=0), [(250, "step_back")]),
    ],
)
def test_every_rule_that_is_broken_is_a_fault_of_its_line(
    spoil: Callable[[Lines], object], expected: list[tuple[int, str]], lines: Lines
) -> None:
    spoil(lines)
    numbered = [(len(lines) if line == LAST else line, code) for line, code in expected]
    assert places(faults_of(dump(lines))) == numbered


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", "not_json"),
        (b"\xff\xfe", "not_json"),
        (b"[" * 100_000, "not_json"),
        (b"[1]", "not_an_object"),
        (b"null", "not_an_object"),
        (b'{"event":7}', "no_event"),
    ],
)
def test_a_line_that_is_no_record_is_one_fault_and_the_next_line_is_read(
    line: bytes, code: str, trace: Path
) -> None:
    data = trace.read_bytes().splitlines(keepends=True)
    data[100] = line + b"\n"
    assert places(faults_of(b"".join(data))) == [(101, code)]


def test_what_a_newer_minor_version_adds_is_no_fault(
    lines: Lines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines[0]["version"] = [1, 9]
    lines[30]["mood"] = "good"
    lines[40] = {"event": "SPECULATE", "event_id": lines[40]["event_id"]}
    path = tmp_path / "newer.jsonl"
    path.write_bytes(dump(lines))
    outcome = call(capsys, "validate", path)
    assert outcome.code == 0
    assert "1 events are of a newer nvtrace" in outcome.err


def test_a_newer_major_version_is_refused(
    lines: Lines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines[0]["version"] = [2, 0]
    path = tmp_path / "newer.jsonl"
    path.write_bytes(dump(lines))
    assert call(capsys, "validate", path).code == 4


def test_a_good_trace_is_said_to_be_good(
    trace: Path, lines: Lines, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "validate", trace)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == f"{len(lines)} lines, all valid by the schema and the envelope's rules\n"
    assert call(capsys, "validate", trace, "--json").out == ""
    assert call(capsys, "validate", trace, "--lang", "zh").out.startswith(f"{len(lines)} 行")


@pytest.mark.parametrize(("num_kept", "cut"), [(50, b""), (50, b'{"event":"PREE')])
def test_a_killed_runs_trace_is_valid_with_a_warning(
    num_kept: int, cut: bytes, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "killed.jsonl"
    path.write_bytes(b"".join(trace.read_bytes().splitlines(keepends=True)[:num_kept]) + cut)
    outcome = call(capsys, "validate", path)
    assert outcome.code == 0
    assert "has no footer" in outcome.err
    assert ("(51) is cut" in outcome.err) == bool(cut)


def test_faults_are_shown_up_to_a_bound_and_counted_to_the_end(
    lines: Lines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in lines[10:60]:
        del line["event"]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(dump(lines))
    outcome = call(capsys, "validate", path)
    assert outcome.code == 1
    shown = outcome.out.splitlines()
    assert len(shown) == 22
    assert shown[0].startswith("line 11: ")
    assert shown[-2] == "and 30 more: --all shows them"
    assert shown[-1] == f"50 errors in {len(lines)} lines"
    assert len(call(capsys, "validate", path, "--all").out.splitlines()) == 51
    found = [json.loads(line) for line in call(capsys, "validate", path, "--json").out.splitlines()]
    assert [fault["line"] for fault in found] == [*range(11, 61)]
    plain = call(capsys, "validate", path, "--plain").out.splitlines()
    assert plain[1].split("\t")[:2] == ["11", "no_event"]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_fault_has_words_and_moves_no_cursor(
    lang: str, lines: Lines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b[2J\x07\u202e{x}\n"
    lines[0]["schema"] = evil
    lines[10] |= {"event_id": evil}
    lines[20] |= {"step": {evil: 1}}
    lines[30] = {"event": evil, "event_id": evil}
    lines[40] = {"event": 4}
    lines[50]["ts_ns"] = 0
    lines[250]["step"] = 1
    lines[-1]["num_events"] = 3
    lines += [lines[0], {}]
    data = dump(lines) + b"[1]\n\x1b[2J\n" + json.dumps(evil).encode() + b"\n"
    path = tmp_path / "bad.jsonl"
    path.write_bytes(data)
    for form in ("--all", "--json", "--plain"):
        outcome = call(capsys, "validate", path, form, "--lang", lang)
        assert outcome.code == 1
        assert all(line.replace("\t", "").isprintable() for line in outcome.out.splitlines())
    told = call(capsys, "validate", path, "--json", "--lang", lang).out.splitlines()
    codes = {json.loads(line)["fault"] for line in told}
    assert codes >= {"other_schema", "event_id", "not_the_schema", "no_event", "not_an_object"}
    assert codes >= {"ts_back", "step_back", "num_events", "after_footer", "second_header"}


def test_what_cannot_be_read_is_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert call(capsys, "validate", empty).code == 3
    assert call(capsys, "validate", tmp_path / "none.jsonl").code == 3
    assert call(capsys, "validate", empty, "--json", "--plain").code == 2


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "packed with bzip2: unpack it first": bz2.compress,
    "packed with xz: unpack it first": lzma.compress,
    "packed with lzma: unpack it first": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "packed twice: unpack it once": lambda data: zstandard.compress(gzip.compress(data)),
    "packed twice: unpack it once ": lambda data: gzip.compress(zstandard.compress(data)),
    "UTF-8 with a byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "UTF-16": lambda data: data.decode().encode("utf-16"),
    "UTF-16 ": lambda data: data.decode().encode("utf-16-le"),
}


@pytest.mark.parametrize("what", PACKINGS)
@pytest.mark.parametrize("command", ["validate", "check", "stats"])
def test_a_file_that_is_no_text_is_named_in_one_sentence(
    command: str, what: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(PACKINGS[what](trace.read_bytes()))
    outcome = call(capsys, command, path)
    assert (outcome.code, outcome.out) == (3, "")
    assert f"its first line is not a header: it is {what.strip()}" in " ".join(outcome.err.split())


@pytest.mark.parametrize("rubbish", [b"rubbish", b'{"event":"PREE', b"\0" * 512])
def test_rubbish_behind_the_footer_is_a_fault(
    rubbish: bytes, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "longer.jsonl"
    path.write_bytes(trace.read_bytes() + rubbish)
    validator = Validator()
    faults = list(validate(path, validator, warn=pytest.fail))
    assert places(faults)[0] == (validator.num_lines, "after_footer")
    assert call(capsys, "validate", path).code == 1
    outcome = call(capsys, "check", path)
    assert "1 lines come after the footer" in " ".join(outcome.err.split())


def test_stdin_is_validated_too(trace: Path, lines: Lines) -> None:
    outcome = spawn("validate", "-", stdin=trace.read_bytes())
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"{len(lines)} lines")


def test_a_file_is_read_once_and_in_order(trace: Path, lines: Lines) -> None:
    validator = Validator()
    assert list(validate(trace, validator, warn=pytest.fail)) == []
    assert validator.num_lines == len(lines)
    assert validator.has_footer


def test_the_schema_that_is_printed_is_the_committed_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = call(capsys, "schema")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == (ROOT / "docs" / "trace.schema.json").read_text("utf-8")


# -- completion ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "offered"), [("nvtrace va", "validate"), ("nvtrace export --t", "--to")]
)
def test_a_shell_is_told_how_a_word_goes_on(line: str, offered: str) -> None:
    outcome = spawn(
        _NVTRACE_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(line.count(" "))
    )
    assert outcome.out.split() == [offered]
