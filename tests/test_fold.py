"""The trace is sufficient: its fold is the engine, after every schedule and every postprocess."""

from __future__ import annotations

import contextlib
import io
import itertools
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm.sampling_params import SamplingParams
from nvtrace import events as ev
from nvtrace.pipeline import Sink
from nvtrace.reader import read_trace
from nvtrace.recorder import Recorder
from nvtrace.replay import InconsistentTraceError, State, fold_steps
from support.fake_runner import InjectedError, make_engine
from support.recording import (
    BUSY,
    BUSY_MIXED,
    HOOKS_OF_A_STEP,
    Interruption,
    Recording,
    assert_fold_equals_engine,
)
from support.snapshot import snapshot_of_engine, snapshot_of_fold
from support.workload import MemoryFile, Workload, workloads

if TYPE_CHECKING:
    from structlog.typing import EventDict

    from nvtrace.envelope import Record
    from support.snapshot import Snapshot

MOMENTS = ("scheduled", "ran", "sampled", *HOOKS_OF_A_STEP)
INTERRUPTIONS = st.builds(
    Interruption, step=st.integers(1, 12), at=st.sampled_from(MOMENTS), is_noted=st.booleans()
)


@given(workloads())
@example(BUSY)
def test_the_fold_equals_the_engine_after_every_schedule_and_postprocess(
    workload: Workload,
) -> None:
    assert_fold_equals_engine(Recording(workload))


@given(workloads(), INTERRUPTIONS)
def test_the_fold_equals_the_engine_after_an_exception_anywhere_in_a_step(
    workload: Workload, interruption: Interruption
) -> None:
    assert_fold_equals_engine(Recording(workload, interruption))


@pytest.mark.parametrize("is_noted", [False, True])
@pytest.mark.parametrize("at", MOMENTS)
def test_an_exception_at_each_moment_of_a_step_resets_engine_and_fold(
    at: str, *, is_noted: bool
) -> None:
    workload = BUSY_MIXED if at == "schedule_mixed" else BUSY
    recording = Recording(workload, Interruption(2, at, is_noted))
    assert recording.run.num_resets == 1, "the exception never struck: choose another workload"
    assert_fold_equals_engine(recording)


def run_through(observer: Recorder) -> Snapshot:
    """BUSY's requests by step() alone, over any InjectedError; what the engine is in the end."""
    engine = make_engine(BUSY.settings, observer)
    sequences = {}
    for _ in range(2):  # a second time, to see that the engine is as good as new
        for request in BUSY.requests[:4]:
            params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)
            seq_id = engine.add_request(request.prompt, params)
            sequences[seq_id] = engine.requests[seq_id]
        while not engine.is_finished():
            with contextlib.suppress(InjectedError, KeyboardInterrupt):
                engine.step()
        assert not engine.requests, "an ended request was never let go"
    return snapshot_of_engine(engine.scheduler, sequences)


@pytest.mark.parametrize("is_noted", [False, True])
@pytest.mark.parametrize("hook", ["step_start", "step_end"])
def test_an_exception_at_the_edges_of_a_step_ends_every_request_as_well(
    hook: str, *, is_noted: bool
) -> None:
    file = MemoryFile()
    recorder = Recorder(Sink(file))
    original, calls = getattr(recorder, hook), itertools.count(1)

    def interrupted(*args: object) -> None:
        is_hit = next(calls) == 3
        if is_noted or not is_hit:
            original(*args)
        if is_hit:
            raise InjectedError

    setattr(recorder, hook, interrupted)
    at_the_end = run_through(recorder)
    recorder.close()
    records = list(read_trace(io.BytesIO(file.contents), warn=pytest.fail))
    assert any(isinstance(record, ev.EngineReset) for record in records)
    assert snapshot_of_fold(fold(records)) == at_the_end


@pytest.mark.parametrize(("error", "num_lost"), [(InjectedError, 1), (KeyboardInterrupt, 0)])
def test_an_exception_while_a_step_is_written_loses_no_more_than_the_event_being_written(
    error: type[BaseException], num_lost: int
) -> None:
    """A processor's own error loses its event; an interruption loses none: it is written later."""
    calls = itertools.count(1)

    def interrupt(_logger: object, _method: str, event_dict: EventDict) -> EventDict:
        if event_dict["event"] == "PREPARE_DECODE_TENSORS" and next(calls) == 3:
            raise error
        return event_dict

    file = MemoryFile()
    warnings: list[str] = []
    recorder = Recorder(Sink(file, report=warnings.append), processors=[interrupt])
    at_the_end = run_through(recorder)
    recorder.close()
    assert len(warnings) == recorder.trace.num_lost == num_lost
    records = list(read_trace(io.BytesIO(file.contents), warn=warnings.append))
    assert len(warnings) == 3 * num_lost  # and that the processors let it not through, and its gap
    assert any(isinstance(record, ev.EngineReset) for record in records) is not bool(num_lost)
    assert snapshot_of_fold(fold(records)) == at_the_end


# -- steps -----------------------------------------------------------------------------------------


def test_fold_steps_gives_each_step_with_the_state_after_it() -> None:
    recording = Recording(BUSY)
    after_steps = [snapshot for point, snapshot in recording.points if point == "postprocess"]
    steps = [(step, snapshot_of_fold(step.state)) for step in fold_steps(recording.records)]
    last, _ = steps.pop()  # what comes after the last step
    assert [snapshot for _, snapshot in steps] == after_steps
    assert [step.index for step, _ in steps] == list(range(1, recording.run.num_steps + 1))
    for step, _ in steps:
        assert step.schedule is not None
        assert step.schedule in step.events
        assert step.schedule.engine_step == step.index
        assert step.end is step.events[-1]
        assert {event.step for event in step.events} == {step.index}
        assert {event.step for event in step.before} <= {None}
    assert (last.index, last.events, last.schedule, last.end) == (0, [], None, None)
    assert isinstance(last.before[-1], ev.RequestOutput)


def test_fold_steps_loses_and_doubles_no_event() -> None:
    recording = Recording(BUSY, Interruption(3, "ran"))
    events = [record for record in recording.records if isinstance(record, ev.Event)]
    grouped = [
        event for step in fold_steps(recording.records) for event in (*step.before, *step.events)
    ]
    assert grouped == events


def test_a_step_that_an_error_ended_has_no_end() -> None:
    recording = Recording(BUSY, Interruption(3, "ran"))
    broken = [step for step in fold_steps(recording.records) if step.index and step.end is None]
    assert [step.index for step in broken] == [3]
    error, reset = broken[0].events[-2:]
    assert isinstance(error, ev.EngineError)
    assert (error.error_type, error.message) == ("InjectedError", "at ran in step 3")
    assert isinstance(reset, ev.EngineReset)


def test_a_trace_cut_in_a_step_gives_what_there_is_of_it() -> None:
    records = Recording(BUSY).records
    cut = next(
        index
        for index, record in enumerate(records)
        if isinstance(record, ev.SampleTokens) and record.step == 2
    )
    *whole, last = fold_steps(records[: cut + 1])
    assert [step.index for step in whole] == [1]
    assert (last.index, last.end, last.events[-1]) == (2, None, records[cut])
    assert last.schedule is not None


def test_fold_steps_goes_on_from_a_state_that_it_is_given() -> None:
    recording = Recording(BUSY)
    whole = State()
    for _ in fold_steps(recording.records, whole):
        pass
    middle = len(recording.records) // 2
    resumed = State()
    for half in (recording.records[:middle], recording.records[middle:]):
        for _ in fold_steps(half, resumed):
            pass
    assert snapshot_of_fold(resumed) == snapshot_of_fold(whole)


# -- traces that cannot be true --------------------------------------------------------------------


def fold(records: list[Record]) -> State:
    state = State()
    for record in records:
        state.apply(record)
    return state


def without_first(kind: type[ev.Event]) -> list[Record]:
    records = Recording(BUSY).records
    del records[first(records, kind)]
    return records


def doubled_first(kind: type[ev.Event]) -> list[Record]:
    records = Recording(BUSY).records
    index = first(records, kind)
    return records[: index + 1] + records[index:]


def changed_first(kind: type[ev.Event], **changes: object) -> list[Record]:
    records = Recording(BUSY).records
    index = first(records, kind)
    event = records[index]
    assert isinstance(event, ev.Event)
    return [*records[:index], msgspec.structs.replace(event, **changes), *records[index + 1 :]]


def first(records: list[Record], kind: type[ev.Event]) -> int:
    return next(index for index, record in enumerate(records) if isinstance(record, kind))


@pytest.mark.parametrize(
    "kind", [ev.EngineReady, ev.RequestEnqueue, ev.StateTransition, ev.BlocksHash, ev.BlocksRelease]
)
def test_a_missing_event_is_found_by_those_that_follow_from_it(kind: type[ev.Event]) -> None:
    with pytest.raises(InconsistentTraceError, match=r"event \d+ .* does not follow"):
        fold(without_first(kind))


@pytest.mark.parametrize(
    "kind",
    [ev.StateTransition, ev.BlocksAllocate, ev.BlocksAppend, ev.BlocksRevive, ev.BlocksEvict],
)
def test_an_event_that_happens_twice_is_found(kind: type[ev.Event]) -> None:
    with pytest.raises(InconsistentTraceError, match=ev.tag_of(kind)):
        fold(doubled_first(kind))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (ev.SampleTokens, {"seq_ids": [99], "token_ids": [1]}),
        (ev.SampleTokens, {"token_ids": []}),
        (ev.BlocksAllocate, {"block_ids": []}),
        (ev.BlocksAllocate, {"block_ids": [[99]], "seq_ids": [0]}),
        (ev.BlocksRelease, {"seq_ids": [99], "block_ids": [[]], "freed": [[]]}),
        (ev.StateTransition, {"previous": "RUNNING"}),
        (ev.StateTransition, {"seq_id": 99}),
    ],
)
def test_an_event_about_what_is_not_there_is_found(
    kind: type[ev.Event], changes: dict[str, object]
) -> None:
    with pytest.raises(InconsistentTraceError, match=ev.tag_of(kind)):
        fold(changed_first(kind, **changes))


@pytest.mark.parametrize("is_doubled", [False, True])
def test_pages_released_by_one_who_does_not_hold_them_are_found(*, is_doubled: bool) -> None:
    records = Recording(BUSY).records
    release = records[first(records, ev.BlocksRelease)]
    assert isinstance(release, ev.BlocksRelease)
    owner, pages, freed = release.seq_ids[0], release.block_ids[0], release.freed[0]
    seq_ids = [owner, owner] if is_doubled else [(owner + 1) % 2]
    num = len(seq_ids)
    changes = {"seq_ids": seq_ids, "block_ids": [pages] * num, "freed": [freed] * num}
    with pytest.raises(InconsistentTraceError, match="BLOCKS_RELEASE"):
        fold(changed_first(ev.BlocksRelease, **changes))


def test_steps_that_run_backwards_are_no_trace() -> None:
    lines = Recording(BUSY).data.replace(b'"step":5,', b'"step":2,').splitlines(keepends=True)
    with pytest.raises(InconsistentTraceError, match="step 2 comes after step"):
        list(fold_steps(read_trace(io.BytesIO(b"".join(lines)))))
