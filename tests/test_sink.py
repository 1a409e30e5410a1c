"""The sink: a disk that fails stops no engine, and is said once."""

from __future__ import annotations

import errno
import io
from typing import TYPE_CHECKING

import pytest

from nvtrace.pipeline import Sink
from nvtrace.reader import read_trace
from nvtrace.recorder import Recorder
from support.fake_runner import make_engine
from support.recording import BUSY
from support.workload import MemoryFile, Run

if TYPE_CHECKING:
    from nvtrace.envelope import Record


def read(data: bytes) -> list[Record]:
    """Read a trace that must be without fault."""
    return list(read_trace(io.BytesIO(data), warn=pytest.fail))


class FullDisk(MemoryFile):
    """A file with room for so many bytes."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.num_whole_lines = 0  # of the writes that went well

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        room = self.capacity - len(self.getvalue())
        super().write(bytes(data)[:room])
        if room < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        self.num_whole_lines += bytes(data).count(b"\n")
        return len(data)


def test_a_full_disk_is_reported_once_and_the_run_goes_on() -> None:
    reports: list[str] = []
    disk = FullDisk(capacity=10_000)
    sink = Sink(disk, report=reports.append)
    recorder = Recorder(sink)
    run = Run(BUSY, recorder).go()
    recorder.close()

    assert len(reports) == 1
    assert "No space left on device" in reports[0]
    assert sink.error is not None
    undisturbed = Run(BUSY).go()
    for seq_id, seq in run.sequences.items():
        assert seq.token_ids == undisturbed.sequences[seq_id].token_ids

    num_lines = recorder.trace.num_events + 2  # with header and footer
    assert 0 < disk.num_whole_lines < num_lines
    assert disk.num_whole_lines + sink.num_lost == num_lines

    warnings: list[str] = []
    records = list(read_trace(io.BytesIO(disk.contents), warn=warnings.append))
    assert len(records) >= disk.num_whole_lines
    assert len(warnings) == 1


def test_a_failing_close_is_reported_as_a_failed_write() -> None:
    class Unclosable(MemoryFile):
        def close(self) -> None:
            super().close()
            raise OSError(errno.EIO, "Input/output error")

    reports: list[str] = []
    recorder = Recorder(Sink(Unclosable(), report=reports.append))
    recorder.close()
    assert len(reports) == 1


def test_a_file_that_was_closed_by_others_is_reported_as_a_failed_write() -> None:
    """Its error is no OSError; it must not come back with each later flush."""
    reports: list[str] = []
    file = MemoryFile()
    recorder = Recorder(Sink(file, report=reports.append))
    run = Run(BUSY, recorder)
    file.close()
    run.go()
    recorder.close()
    assert len(reports) == 1
    assert "closed file" in reports[0]
    assert run.sequences.keys() == Run(BUSY).go().sequences.keys()


def test_a_failed_write_is_said_on_stderr_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(Sink(FullDisk(capacity=0)))
    make_engine(BUSY.settings, recorder)
    recorder.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "the run goes on" in captured.err


def test_a_file_that_takes_less_than_it_is_given_gets_the_rest_as_well() -> None:
    """An unbuffered write may be short: on a pipe, at a signal, on a disk that is nearly full."""

    class Sluggish(MemoryFile):
        def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
            return super().write(bytes(data)[:1000])

    file = Sluggish()
    recorder = Recorder(Sink(file))
    Run(BUSY, recorder).go()
    recorder.close()
    assert len(read(file.contents)) == recorder.trace.num_events + 2
