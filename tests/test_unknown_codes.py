"""A code that nobody knows here: it is shown as it is, and every command goes on.

Whoever adds a policy, or records another engine, has reasons, statuses and phases of its own.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import msgspec
import pytest

import nvtrace
from nvtrace import events as ev
from nvtrace.analysis import request_spans, waiting_by_reason
from nvtrace.check import check
from nvtrace.envelope import Footer, Header, Unknown
from nvtrace.reader import read_trace
from nvtrace.reference import RECORD_TYPES
from support.cli import call
from support.cli_traces import write_records
from support.every import every
from support.mutations import traces

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nvtrace.envelope import Record

WORD = "my_new_word"
SETTINGS = ("device", "dtype", "attention_backend", "policy")
CODED = [
    ("every event", "phase"),
    *(
        (tag, field.name)
        for tag, struct in RECORD_TYPES.items()
        for field in msgspec.structs.fields(struct)
        if ev.codes_of(field.type) and field.name != "phase"
    ),
]
COMMANDS = (
    *("replay", "replay --lang zh --view steps", "replay --view log", "stats", "check"),
    *("validate", "tail --json", "at 9 --moment schedule", "at 9 --plain --lang zh"),
    *("explain --seq 0", "explain --seq 2 --lang zh", "explain --step 4 --lang zh"),
    *("explain --step 7 --plain", "whatif --set policy=mixed", "export --to otlp"),
    *("export --to prometheus", "export --to parquet --out {out}/parquet"),
)


@cache
def sound_traces() -> list[list[Record]]:
    """Traces of runs without a fault, in which every field of every event is found."""
    found = traces()
    return [found[5], found[4], found[1]]


def with_word(tag: str, field: str, at_most: int = 10_000) -> list[Record]:
    """A run of an engine that has a word of its own for a field's codes, or the first of them."""
    for records in sound_traces():
        places = [i for i, record in enumerate(records) if tag in _tags(record)][:at_most]
        changed = [*records]
        for place in places:
            changed[place] = msgspec.structs.replace(records[place], **{field: WORD})
        if places:
            return changed
    raise AssertionError(f"no trace has {tag}")


def _tags(record: Record) -> set[str]:
    names = {str(record.__struct_config__.tag)}
    return names | {"every event"} if isinstance(record, ev.Event) else names


def _coded_fields(record: Record, *, has_status: bool) -> list[str]:
    """The fields that hold codes; a request's status leads it away from the others."""
    return [
        field.name
        for field in msgspec.structs.fields(type(record))
        if ev.codes_of(field.type) and (has_status or field.name != "status")
    ]


def written(path: Path, records: Sequence[Record]) -> Path:
    """The records as a trace."""
    return write_records(path, [r for r in records if not isinstance(r, Unknown)])


@pytest.mark.parametrize(
    ("tag", "field", "at_most"),
    [
        *((*coded, 10_000) for coded in CODED),
        *((*coded, 1) for coded in CODED if coded[0] == "STATE_TRANSITION"),
    ],
)
def test_every_command_goes_on(
    tag: str, field: str, at_most: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(tmp_path / "trace.jsonl", with_word(tag, field, at_most))
    seen = ""
    for command in COMMANDS:
        name, *options = command.format(out=tmp_path).split()
        done = call(capsys, name, trace, *options)
        assert (command, done.code, done.err if done.code else "") == (command, 0, "")
        seen += done.out
    assert WORD in seen or tag == "TRACE_FOOTER"


@pytest.mark.parametrize("field", ["status", "previous", "reason"])
def test_the_picture_has_it(field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(tmp_path / "trace.jsonl", with_word("STATE_TRANSITION", field))
    done = call(capsys, "export", trace, "--to", "perfetto")
    assert (done.code, WORD in done.out) == (0, field != "previous")


@every("tag, field", CODED)
def test_frames_hold_it(tag: str, field: str, tmp_path: Path) -> None:
    trace = nvtrace.load(written(tmp_path / "trace.jsonl", with_word(tag, field)))
    frames = [trace.events, trace.steps, trace.tokens, trace.blocks, trace.requests]
    assert all(len(frame) for frame in frames if tag != "STATE_TRANSITION")
    assert len(trace.at().sequences) >= 0
    request_spans(trace.requests, trace.table("STATE_TRANSITION"))
    waiting_by_reason(trace.table("ADMISSION_STOP"), trace.steps)
    if tag in ev.EVENT_TYPES:
        assert {*trace.table(tag)[field]} == {WORD}


@pytest.mark.parametrize("field", SETTINGS)
def test_settings_may_be_any_words(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(tmp_path / "trace.jsonl", with_word("ENGINE_INIT", field))
    for command in COMMANDS:
        name, *options = command.format(out=tmp_path).split()
        if name != "check":  # a backend that there is none of is a fault
            done = call(capsys, name, trace, *options)
            assert (command, done.code) == (command, 0)


def test_a_code_is_no_fault_but_what_it_does_not_decide_is_judged(tmp_path: Path) -> None:
    records = with_word("ADMISSION_STOP", "reason")
    assert [*check(records)] == []
    for place, record in enumerate(records):
        if isinstance(record, ev.AdmissionStop):
            records[place] = msgspec.structs.replace(record, seq_id=record.seq_id + 1)
    assert {finding.event for finding in check(records)} == {"ADMISSION_STOP"}
    trace = written(tmp_path / "trace.jsonl", records)
    assert any(isinstance(record, ev.AdmissionStop) for record in read_trace(trace))


def test_check_says_which_codes_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(tmp_path / "trace.jsonl", with_word("SCHEDULE_DECODE", "reason", 2))
    done = call(capsys, "check", trace)
    assert "no findings" in done.out
    assert f"reason is '{WORD}' in 2 events SCHEDULE_DECODE" in done.err


def test_an_event_that_nobody_knows_is_shown_and_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [r for r in sound_traces()[0] if isinstance(r, Header | Footer | ev.Event)]
    lines = written(tmp_path / "trace.jsonl", records).read_bytes().splitlines(keepends=True)
    own = b'{"event":"MY_NEW_EVENT","event_id":1,"ts_ns":1,"step":null,"phase":"x","why":[1]}\n'
    trace = tmp_path / "own.jsonl"
    trace.write_bytes(b"".join([lines[0], own, *lines[1:]]))
    for command in COMMANDS:
        name, *options = command.format(out=tmp_path).split()
        if name not in {"check", "validate"}:  # the numbers are out of order
            assert call(capsys, name, trace, *options).code == 0
    assert "MY_NEW_EVENT" in call(capsys, "replay", trace, "--view", "log").out


def test_a_code_moves_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2J\n[bold]"
    for is_lost in (False, True):
        records = [
            msgspec.structs.replace(
                record, **dict.fromkeys(_coded_fields(record, has_status=is_lost), hostile)
            )
            for record in sound_traces()[0]
        ]
        trace = written(tmp_path / "trace.jsonl", records)
        for command in ("replay", "replay --view log", "explain --step 4", "explain --seq 2", "at"):
            name, *options = command.split()
            done = call(capsys, name, trace, *options)
            assert (done.code, "\x1b" in done.out + done.err) == (0, False)
