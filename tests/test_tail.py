"""nvtrace tail: what a run writes is seen while it writes, up to its end."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import zstandard

from nvtrace.envelope import Footer, Header, Unknown, encode_into
from nvtrace.follow import follow_trace
from nvtrace.pipeline import open_sink
from nvtrace.reader import UnreadableTraceError, read_trace
from support.cli import call, command, environment
from support.cli_traces import crowded_run, write_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nvtrace.envelope import Record
    from nvtrace.events import Event


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("trace") / "trace.jsonl", crowded_run())


def follow(
    path: Path, pause: Callable[[], object], missing: Callable[[], object] = pytest.fail
) -> list[Record]:
    return list(follow_trace(path, pause=pause, missing=missing))


def line_of(record: Header | Footer | Event) -> bytes:
    buffer = bytearray()
    encode_into(record, buffer)
    return bytes(buffer)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz", "trace.jsonl.zst"])
def test_records_are_seen_as_they_are_flushed(name: str, trace: Path, tmp_path: Path) -> None:
    records = [record for record in read_trace(trace) if not isinstance(record, Unknown)]
    path = tmp_path / name
    sink, _ = open_sink(path)
    coming = iter(records)
    seen: list[Record] = []
    num_flushed = 0

    def write_some() -> None:
        """Called when all that was flushed has been seen."""
        nonlocal num_flushed
        assert len(seen) == num_flushed
        for record in (next(coming), next(coming)) if num_flushed < 20 else coming:
            sink.write(line_of(record))
            num_flushed += 1
        sink._flush()

    for record in follow_trace(path, pause=write_some, missing=pytest.fail):
        seen.append(record)  # noqa: PERF402 - `write_some` looks at it meanwhile
    sink.close()
    assert seen == records


def test_a_line_that_comes_in_pieces_is_one_record(trace: Path, tmp_path: Path) -> None:
    data = trace.read_bytes()[:3000] + line_of(Footer(event_id=1, num_events=0, exit="ok"))
    data = data[: data.rindex(b"\n", 0, 3000) + 1] + data[3000:]
    path = tmp_path / "trace.jsonl"
    path.touch()
    pieces = iter(data[start : start + 7] for start in range(0, len(data), 7))

    def write_piece() -> None:
        with path.open("ab") as file:
            file.write(next(pieces))

    seen = follow(path, write_piece)
    assert isinstance(seen[0], Header)
    assert isinstance(seen[-1], Footer)
    assert len(seen) == data.count(b"\n")


def test_a_file_that_is_not_there_is_waited_for_and_said_once(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "late.jsonl"
    said: list[str] = []
    num_pauses = 0

    def pause() -> None:
        nonlocal num_pauses
        num_pauses += 1
        if num_pauses == 5:
            path.write_bytes(trace.read_bytes())

    seen = follow(path, pause, missing=lambda: said.append("missing"))
    assert seen == list(read_trace(trace))
    assert said == ["missing"]


@pytest.mark.parametrize(
    ("happens", "said"),
    [
        (lambda path: path.unlink(), "was removed"),
        (lambda path: path.write_bytes(b""), "was cut"),
        (lambda path: (path.rename(f"{path}.1"), path.touch()), "was replaced"),
    ],
    ids=["removed", "cut", "replaced"],
)
def test_a_file_that_is_taken_away_is_an_error(
    happens: Callable[[Path], object], said: str, trace: Path, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(trace.read_bytes().splitlines(keepends=True)[:10]))
    with pytest.raises(UnreadableTraceError, match=said):
        follow(path, lambda: happens(path))


def test_what_is_no_trace_is_refused_at_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n", encoding="utf-8")
    with pytest.raises(UnreadableTraceError, match=rf"^{path} is not .* not a header"):
        follow(path, pytest.fail)


@pytest.mark.parametrize("options", [[], ["--json"], ["--event", "PREEMPT"], ["--seq", "1"]])
def test_a_whole_trace_is_the_log_that_replay_shows(
    options: list[str], trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = call(capsys, "replay", trace, "--view", "log", *options)
    tail = call(capsys, "tail", trace, *options)
    assert (tail.code, tail.err) == (0, "")
    assert tail.out == log.out


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_compressed_trace_is_followed_to_its_end(
    ending: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"trace.jsonl{ending}"
    pack = gzip.compress if ending == ".gz" else zstandard.compress
    path.write_bytes(pack(trace.read_bytes()))
    assert call(capsys, "tail", path).out == call(capsys, "tail", trace).out


@pytest.mark.parametrize(
    ("file", "code", "said"), [("-", 2, "standard input"), (".", 3, "cannot be opened")]
)
def test_what_cannot_be_followed_is_said(
    file: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "tail", file)
    assert (outcome.code, outcome.out) == (code, "")
    assert said in outcome.err


def test_a_pipe_is_followed_to_the_footer_or_for_ever(trace: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data = trace.read_bytes()
    cut = data.rindex(b"\n", 0, len(data) - 1) + 1

    with ThreadPoolExecutor() as threads:
        threads.submit(pipe.write_bytes, data)
        assert follow(pipe, pytest.fail) == list(read_trace(trace))
        threads.submit(pipe.write_bytes, data[:cut])
        with pytest.raises(InterruptedByTestError):  # there may be another writer
            follow(pipe, _give_up)


class InterruptedByTestError(Exception):
    """Waited long enough."""


def _give_up() -> None:
    raise InterruptedByTestError


def test_ctrl_c_while_waiting_ends_with_130(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nvtrace_cli.tail.time.sleep", interrupt)
    outcome = call(capsys, "tail", tmp_path / "never.jsonl")
    assert outcome.code == 130
    assert outcome.err.count("waiting for") == 1


def test_lines_come_through_a_pipe_while_the_run_goes_on(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = trace.read_bytes().splitlines(keepends=True)
    process = subprocess.Popen(
        command("tail", path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert b"waiting for" in process.stderr.readline()
    with path.open("ab", buffering=0) as file:
        file.write(b"".join(lines[:2]))
        assert process.stdout.readline().startswith(b"TEACHING/ENGINE_INIT")
        file.write(b"".join(lines[2:]))
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors == b""
    num_second_lines = sum(b"KV_BUDGET_EST" in line or b"PREPARE_DECODE" in line for line in lines)
    # Without header, footer and the line before.
    assert rest.count(b"\n") == len(lines) - 3 + num_second_lines


def test_ctrl_c_from_the_terminal_stops_watching(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(trace.read_bytes().splitlines(keepends=True)[:2]))
    process = subprocess.Popen(
        command("tail", path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"TEACHING/")
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == b""
