"""Whatever a file holds, every command that reads a trace ends as the design says it does."""

from __future__ import annotations

import gzip
from random import Random
from typing import TYPE_CHECKING

import pytest
import zstandard

from nvtrace_cli.views.text import escape_json
from support import fuzz_reader
from support.cli import call
from support.fuzz_reader import (
    COMMANDS,
    Case,
    change_start,
    draw_case,
    draw_commands,
    examine,
    run_captured,
)

if TYPE_CHECKING:
    from pathlib import Path

SEED = 1
ENOUGH = 12  # broken traces, a few commands each: seconds


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return fuzz_reader.good_traces(tmp_path_factory.mktemp("good"))


def faults(case: Case, folder: Path, tmp_path: Path, commands: tuple[str, ...]) -> list[str]:
    return [str(fault) for fault in examine(case, folder / "crowded.jsonl", tmp_path, commands)]


@pytest.mark.usefixtures("eighty_columns")
def test_a_short_fuzz_finds_nothing(traces: list[bytes], folder: Path, tmp_path: Path) -> None:
    for index in range(ENOUGH):
        case = draw_case(traces, SEED, index)
        own = tmp_path / str(index)
        own.mkdir()
        assert faults(case, folder, own, draw_commands(SEED, index)) == [], case.story


COUNTING = ("check", "replay", "whatif", "stats", "explain", "diff", "export", "at")


@pytest.mark.usefixtures("eighty_columns")
def test_whatever_a_start_tells_ends_with_a_code_of_the_design(
    traces: list[bytes], folder: Path, tmp_path: Path
) -> None:
    random = Random(SEED)
    of_numbers = [command for command in COMMANDS if command.startswith(COUNTING)]
    for number in range(25):
        data = change_start(random.choice(traces), random)
        case = Case(data, ".jsonl", f"start {number}")
        own = tmp_path / f"start{number}"
        own.mkdir()
        assert faults(case, folder, own, (*random.sample(of_numbers, 3),)) == [], data[:2000]


@pytest.mark.usefixtures("eighty_columns")
def test_a_whole_trace_is_read_by_every_command(
    traces: list[bytes], folder: Path, tmp_path: Path
) -> None:
    case = Case(traces[0], ".jsonl", "nothing")
    assert faults(case, folder, tmp_path, COMMANDS) == []
    for command in COMMANDS:
        words = command.replace("TRACE", str(tmp_path / "trace.jsonl")).split()
        if not {"GOOD", "OUT"} & {*words}:
            assert run_captured(words)[0] == (words[0] == "check"), command  # its pages are made up


def test_a_case_depends_on_its_seed_and_its_number_alone(traces: list[bytes]) -> None:
    assert draw_case(traces, SEED, 8) == draw_case(traces, SEED, 8)
    assert draw_commands(SEED, 8) == draw_commands(SEED, 8)
    assert len({draw_case(traces, seed, index).data for seed in (1, 2) for index in (8, 9)}) == 4


# -- the fuzz sees what it looks for ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("planted", "seen"),
    [
        ("raise ZeroDivisionError('planted')", "code 70"),
        ("import sys; sys.stdout.write('\\x1b[2J')", "a control character comes out"),
        ("import sys; sys.stderr.write('Traceback: planted\\n')", "stderr has"),
        ("held = bytearray(700 * 2**20)", "takes 7"),
        ("raise SystemError('planted')", "code 70"),
    ],
)
def test_a_planted_fault_is_found(
    planted: str, seen: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*_arguments: object, **_options: object) -> None:
        exec(planted)  # noqa: S102 - it is written above

    monkeypatch.setattr("nvtrace_cli.views.stats.show", faulty)
    case = Case((folder / "crowded.jsonl").read_bytes(), ".jsonl", "nothing")
    (found,) = faults(case, folder, tmp_path, ("stats TRACE",))
    assert seen in found


# -- what the fuzz has found -----------------------------------------------------------------------


@pytest.mark.parametrize("command", ["stats", "validate"])
@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_bomb_is_refused_before_it_goes_off(ending: str, command: str, tmp_path: Path) -> None:
    zeros = bytes(260 * 2**20)  # and no line among them
    bomb = gzip.compress(zeros, 1) if ending == "gz" else zstandard.compress(zeros)
    trace = tmp_path / f"bomb.{ending}"
    trace.write_bytes(bomb)
    code, _, err = run_captured([command, str(trace)])
    assert (code, err.count("\n")) == (3, 1)


def test_nesting_without_end_in_an_unknown_event_is_shown_to_some_depth(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (folder / "crowded.jsonl").read_bytes().splitlines(keepends=True)
    deep = b'{"event":"NEW","event_id":2,"x":' + b"[" * 500 + b"]" * 500 + b"}\n"
    (tmp_path / "deep.jsonl").write_bytes(lines[0] + deep + b"".join(lines[1:]))
    outcome = call(capsys, "replay", tmp_path / "deep.jsonl", "--view", "log")
    assert outcome.code == 0
    assert "x=[[[[[[[[[[[[[[[[[...]]]]]]]]]]]]]]]]]" in outcome.out


def test_a_request_that_arrives_twice_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (folder / "crowded.jsonl").read_bytes().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if b"REQUEST_ENQUEUE" in line)
    lines.insert(place, lines[place])
    (tmp_path / "twice.jsonl").write_bytes(b"".join(lines))
    for command in (["at"], ["at", "3"], ["replay"], ["whatif", "--set", "policy=mixed"]):
        outcome = call(capsys, command[0], tmp_path / "twice.jsonl", *command[1:])
        assert outcome.code == 3, command
        assert "request 0" in outcome.err


def test_lists_of_unequal_length_are_named_with_their_event(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "crowded.jsonl").read_text()
    place = text.index('"num_cached_tokens":[')
    broken = text[:place] + text[place:].replace(
        '"num_cached_tokens":[0,', '"num_cached_tokens":[', 1
    )
    (tmp_path / "unequal.jsonl").write_text(broken)
    for command in (["stats"], ["whatif", "--set", "policy=mixed"], ["export", "--to", "otlp"]):
        outcome = call(capsys, command[0], tmp_path / "unequal.jsonl", *command[1:])
        assert outcome.code == 3, command
        assert "contradicts itself" in outcome.err


def test_a_message_that_quotes_something_without_measure_stays_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.jsonl").write_text("x" * 100)
    outcome = call(capsys, "replay", tmp_path / ("y" * 200) / ("z" * 3000))
    assert outcome.code == 3
    assert len(outcome.err) < 1100


def test_json_is_escaped_where_a_terminal_would_obey_it() -> None:
    assert escape_json('{"a": "质数 \u202e\x9b31m 😀\U000e0001"}') == (
        '{"a": "质数 \\u202e\\u009b31m 😀\\udb40\\udc01"}'
    )


def test_a_step_beyond_all_measure_has_its_place_on_the_axis(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "crowded.jsonl").read_text()
    (tmp_path / "far.jsonl").write_text(text.replace('"step":3,', f'"step":{2**63},'))
    outcome = call(capsys, "replay", tmp_path / "far.jsonl")
    assert outcome.code == 3
    assert f"comes after step {2**63}" in outcome.err
    assert "prefill" in outcome.out
