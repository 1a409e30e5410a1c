"""Long traces: what is kept of them, and where the bar goes while they are read."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import tempfile
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from nvtrace import events as ev
from nvtrace.caveats import saying_untimed
from nvtrace.envelope import Header
from nvtrace.reader import read_trace
from nvtrace.replay import State
from nvtrace.summarize import summarize, summarize_steps
from nvtrace.summary import RunSummary
from support.cli import call, command, environment
from support.cli_traces import HOSTILE_TEXT, write_records

if TYPE_CHECKING:
    from pathlib import Path

    from nvtrace.envelope import Record

pytestmark = pytest.mark.usefixtures("eighty_columns")

_LARGE_BYTES = 9 * 2**20  # where a bar is drawn


def records_of(path: Path) -> list[Record]:
    return list(read_trace(path, warn=pytest.fail))


# -- what is kept ----------------------------------------------------------------------------------


def test_steps_that_nobody_asked_for_are_counted_and_not_kept(folder: Path) -> None:
    records = records_of(folder / "crowded.jsonl")
    whole = summarize(records)
    part = summarize(records, is_wanted=lambda step: 10 <= step <= 12)
    assert [step.index for step in part.steps] == [10, 11, 12]
    assert part.steps == whole.steps[9:12]
    assert (part.sums, part.requests) == (whole.sums, whole.requests)
    assert (part.first_step, part.last_step) == (1, len(whole.steps))


def test_ended_requests_are_forgotten_on_the_way(folder: Path) -> None:
    header, *records = records_of(folder / "crowded.jsonl")
    assert isinstance(header, Header)
    state = State()
    for step in summarize_steps(records, RunSummary(header), state):
        ended = {*step.aborted, *(seq_id for seq_id, _ in step.finished)}
        assert state.sequences.keys() == {*step.waiting, *step.running, *ended}


def test_what_steps_have_in_common_is_kept_once(folder: Path) -> None:
    steps = summarize(records_of(folder / "article.jsonl")).steps
    middle = steps[20:140]
    for name in ("shares", "running", "waiting", "tags"):
        assert len({id(getattr(step, name)) for step in middle}) == 1, name


def test_of_a_long_answer_the_beginning_is_kept(folder: Path) -> None:
    records = records_of(folder / "article.jsonl")
    long = [replace(r, text="x" * 10**6) if isinstance(r, ev.RequestOutput) else r for r in records]
    texts = [request.text for request in summarize(long).requests.values()]
    assert all(text is not None and len(text) == 1000 for text in texts)


def test_a_range_of_steps_lists_the_requests_that_were_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = folder / "article.jsonl"
    assert "seq 0" in call(capsys, "replay", trace, "--steps", "140..150").out
    after = call(capsys, "replay", trace, "--steps", "200..210").out
    assert "seq 0" not in after
    assert "seq 1" in after
    assert "256 = 1 prefill + 255 decode" in after


# -- the bar ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace that is large enough for a bar: one request's text is long."""
    records = records_of(folder / "crowded.jsonl")
    place = next(i for i, r in enumerate(records) if isinstance(r, ev.RequestOutput))
    records[place] = replace(records[place], text="x" * _LARGE_BYTES)
    path = tmp_path_factory.mktemp("large") / "large.jsonl"
    return write_records(path, records)  # type: ignore[arg-type]  # none of them is unknown


def on_terminal(arguments: list[str], *, is_stdout: bool) -> tuple[bytes, bytes]:
    """Run a command with stderr on a terminal. Returns what went to stdout, and to the terminal."""
    ours, theirs = pty.openpty()
    with tempfile.TemporaryFile() as data:
        process = subprocess.Popen(
            arguments,
            stdout=theirs if is_stdout else data,
            stderr=theirs,
            env=environment(TERM="xterm"),
        )
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # the last writer has closed it
            while chunk := os.read(ours, 65536):
                seen += chunk
        os.close(ours)
        process.wait(timeout=60)
        data.seek(0)
        return data.read(), seen


@pytest.mark.parametrize(
    "words", [["stats", "--json"], ["check", "--json"], ["replay", "--json"], ["replay", "--plain"]]
)
def test_data_goes_where_it_is_sent_while_a_bar_is_drawn(words: list[str], large: Path) -> None:
    out, seen = on_terminal(command(words[0], large, *words[1:]), is_stdout=False)
    assert b"MiB" in seen
    assert b"{" not in seen
    assert b"decode" not in seen
    for line in out.splitlines() if "--json" in words else []:
        json.loads(line)
    assert out or words[0] == "check"


def test_findings_are_shown_whole_beside_a_bar(large: Path) -> None:
    _, seen = on_terminal(command("check", large, "--all"), is_stdout=True)
    out, _ = on_terminal(command("check", large, "--all"), is_stdout=False)
    assert out.count(b"ENGINE_READY") >= 1
    assert seen.count(b"ENGINE_READY") == out.count(b"ENGINE_READY")


def test_without_a_terminal_there_is_no_bar(
    large: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("stats", "check", "replay"):
        assert call(capsys, name, large).err == ""


# -- a simulated trace without all times -----------------------------------------------------------


def test_steps_without_a_simulated_time_are_told_of(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "simulated.jsonl"
    changes = ("--set", "max_num_batched_tokens=30", "--out", trace)
    assert call(capsys, "whatif", folder / "crowded.jsonl", *changes).code == 0
    for words in (["stats"], ["stats", "--json"], ["replay"], ["replay", "--json"]):
        outcome = call(capsys, words[0], trace, *words[1:])
        assert outcome.code == 0
        assert "is simulated, and 4 of its steps are unlike any recorded step" in outcome.err
    assert call(capsys, "stats", folder / "crowded.jsonl").err == ""


@pytest.mark.parametrize("told", [0, None])
def test_a_header_that_tells_of_no_such_steps_is_passed_on_in_silence(
    told: int | None, folder: Path
) -> None:
    header = records_of(folder / "crowded.jsonl")[0]
    assert isinstance(header, Header)
    strange = replace(header, clock={"num_untimed_steps": told})
    assert list(saying_untimed(iter([strange]), "trace", pytest.fail)) == [strange]


# -- data on a terminal ----------------------------------------------------------------------------


def test_json_is_escaped_where_a_terminal_would_obey_it(folder: Path) -> None:
    words = command("replay", folder / "article.jsonl", "--view", "log", "--json")
    for is_stdout in (False, True):
        shown = b"".join(on_terminal(words, is_stdout=is_stdout))
        (line, *_) = [line for line in shown.splitlines() if b"REQUEST_OUTPUT" in line]
        assert HOSTILE_TEXT in json.loads(line)["text"]
        assert ("\u202e" in line.decode()) is not is_stdout
