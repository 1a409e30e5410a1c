"""Faults that a critic found in the trace's edges: each with the smallest run that shows it."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from nanovllm.observer import Observer
from nanovllm.sampling_params import SamplingParams
from nvtrace import events as ev
from nvtrace.pipeline import Sink, open_sink
from nvtrace.reader import read_trace
from nvtrace.recorder import Recorder, record
from nvtrace.replay import InconsistentTraceError, fold_steps
from support.fake_runner import InjectedError, Settings, make_engine, runner_of
from support.recording import BUSY, BUSY_MIXED, Recording
from support.workload import MemoryFile

if TYPE_CHECKING:
    from pathlib import Path

    from nanovllm.engine.batch import Batch
    from nanovllm.engine.sequence import Sequence
    from support.fake_runner import Moment

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def test_a_link_is_never_renamed_and_what_it_leads_to_never_lost(tmp_path: Path) -> None:
    target, link = tmp_path / "target.jsonl", tmp_path / "trace.jsonl"
    target.write_text("precious")
    link.symlink_to(target)
    with pytest.raises(FileExistsError, match="give another file"):
        open_sink(link, existing="error")
    assert target.read_text() == "precious"
    sink, kept = open_sink(link)
    sink.write(b"line\n")
    sink.close()
    assert kept == tmp_path / "target.1.jsonl"
    assert (link.is_symlink(), kept.read_text(), target.read_text()) == (True, "precious", "line\n")


def test_an_engine_goes_on_after_its_trace_is_closed_and_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with record(tmp_path / "trace.jsonl") as recorder:
        engine = make_engine(Settings(), recorder)
    for _ in range(2):
        assert len(engine.generate([[1, 2]], PARAMS)[0]["token_ids"]) == 3
    assert capsys.readouterr().err.count("the trace is closed") == 1
    assert len(list(read_trace(tmp_path / "trace.jsonl", warn=pytest.fail))) > 2


class FailsToHear(Observer):
    """Raises when it is told of an error or of the reset after it."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def engine_error(self, error: BaseException) -> None:
        if self.hook == "engine_error":
            raise OSError("deaf") from error

    def engine_reset(self, seqs: list[Sequence]) -> None:
        if self.hook == "engine_reset":
            raise OSError("deaf", len(seqs))


@pytest.mark.parametrize("hook", ["engine_error", "engine_reset"])
def test_an_observer_that_fails_while_an_error_is_told_leaves_nothing_behind(hook: str) -> None:
    engine = make_engine(Settings(), FailsToHear(hook))
    is_armed = [True]

    def strike(moment: Moment, _batch: Batch) -> None:
        if moment == "ran" and is_armed.pop():
            raise InjectedError

    runner_of(engine).at = strike
    with pytest.raises((InjectedError, OSError)):
        engine.generate([[1, 2], [3]], PARAMS)
    runner_of(engine).at = lambda _moment, _batch: None
    assert not engine.requests
    assert engine.is_finished()
    assert len(engine.generate([[1, 2]], PARAMS)[0]["token_ids"]) == 3


def test_lines_that_are_missing_from_the_middle_are_noticed() -> None:
    lines = Recording(BUSY).data.splitlines(keepends=True)
    warnings: list[str] = []
    list(read_trace(io.BytesIO(b"".join(lines[:20] + lines[27:])), warn=warnings.append))
    assert warnings == ["the trace: 7 events are missing, according to the event ids"]


def test_steps_that_run_backwards_are_no_trace() -> None:
    lines = Recording(BUSY).data.replace(b'"step":5,', b'"step":2,').splitlines(keepends=True)
    with pytest.raises(InconsistentTraceError, match="step 2 comes after step"):
        list(fold_steps(read_trace(io.BytesIO(b"".join(lines)))))


def test_ready_in_counts_from_the_engines_start_not_from_the_recorders() -> None:
    file = MemoryFile()
    recorder = Recorder(Sink(file))
    start = recorder.trace.now()
    while recorder.trace.now() - start < 50_000_000:
        pass
    make_engine(Settings(), recorder)
    recorder.close()
    events = [r for r in read_trace(io.BytesIO(file.contents)) if isinstance(r, ev.Event)]
    (init,) = [event for event in events if isinstance(event, ev.EngineInit)]
    (ready,) = [event for event in events if isinstance(event, ev.EngineReady)]
    assert ready.duration_ns <= ready.ts_ns - init.ts_ns + 1_000_000


@pytest.mark.parametrize("workload", [BUSY, BUSY_MIXED], ids=["prefill_first", "mixed"])
def test_pages_are_released_in_the_phase_that_releases_them(workload: object) -> None:
    assert workload in (BUSY, BUSY_MIXED)
    recording = Recording(BUSY if workload is BUSY else BUSY_MIXED)
    events = [record for record in recording.records if isinstance(record, ev.Event)]
    for before, event in pairwise(events):
        if isinstance(event, ev.Preempt):
            assert before.phase == event.phase in {"decode", "mixed"}
        elif isinstance(event, ev.StateTransition) and event.status == "FINISHED":
            assert before.phase == event.phase == "postprocess" or event.reason == "aborted"


def test_half_a_character_in_a_prompt_is_named() -> None:
    engine = make_engine(Settings())
    with pytest.raises(ValueError, match="not valid Unicode at character 3: half a surrogate pair"):
        engine.add_request("abc\ud800", PARAMS)
    assert not engine.requests
