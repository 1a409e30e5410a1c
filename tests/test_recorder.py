"""The recorder: every moment of the engine becomes one event of the same name."""

from __future__ import annotations

import asyncio
import inspect
import io
import itertools
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import nanovllm
from nanovllm.engine.kv_cache import KVBudget
from nanovllm.engine.sequence import Sequence
from nanovllm.observer import Observer
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.loader import LoadedWeights
from nvtrace import events as ev
from nvtrace.envelope import Footer, Header
from nvtrace.events import new
from nvtrace.pipeline import Sink
from nvtrace.reader import read_trace
from nvtrace.recorder import Recorder, record
from support.every import every
from support.fake_runner import Settings, make_engine
from support.recording import BUSY, BUSY_MIXED, Interruption, Recording
from support.workload import MemoryFile, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from structlog.typing import EventDict, Processor

    from nvtrace.envelope import Record

HOOKS = [name for name in vars(Observer) if not name.startswith("_")]


def read(data: bytes) -> list[Record]:
    """Read a trace that must be without fault."""
    return list(read_trace(io.BytesIO(data), warn=pytest.fail))


def recorded(speak: Callable[[Recorder], object]) -> list[Record]:
    """What comes back of what a recorder was told."""
    file = MemoryFile()
    recorder = Recorder(Sink(file))
    speak(recorder)
    recorder.close()
    return read(file.contents)


# -- one word in three spellings -------------------------------------------------------------------


@every("hook", HOOKS)
def test_the_recorder_overrides_each_hook_with_the_same_parameters(hook: str) -> None:
    assert hook in vars(Recorder)
    ours, theirs = vars(Recorder)[hook], vars(Observer)[hook]
    assert inspect.signature(ours) == inspect.signature(theirs)


def test_every_hook_has_an_event_and_every_event_a_hook() -> None:
    silent = {
        "step_start",  # it only sets the clock: STEP_END says what it was for
        "gpu_time",  # a part of STEP_END, known before the step's end
        "failed",  # no moment, but an error of a method
        "for_workers",  # no moment, but a question: who listens to the other ranks?
    }
    assert {tag.lower() for tag in ev.EVENT_TYPES} == {*HOOKS} - silent


def test_every_hook_is_called_somewhere_in_the_engine() -> None:
    package = Path(nanovllm.__file__).parent
    files = [file for file in package.rglob("*.py") if "assets" not in file.parts]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    called = {*re.findall(r"\bobserver\.(\w+)\(", source)}
    assert called == {*HOOKS}


def test_every_event_is_written_by_its_hook_and_comes_back() -> None:
    budget = KVBudget(
        rule="given",
        total_bytes=2**34,
        free_bytes=2**33,
        used_bytes=2**33,
        utilization=0.9,
        limit_bytes=2**31,
        num_local_ranks=1,
        available_bytes=2**30,
        num_layers=2,
        block_size=16,
        num_kv_heads=2,
        head_dim=8,
        dtype_bytes=4,
        block_bytes=2**12,
        num_blocks=100,
    )

    def start_up(recorder: Recorder) -> None:
        make_engine(BUSY.settings, recorder)
        recorder.tp_runtime_init(0, 1, "cpu", None)
        recorder.model_weights_loaded(LoadedWeights(num_files=1, num_keys=9, num_bytes=1000))
        recorder.warmup_model(num_seqs=2, seq_len=8, peak_bytes=None)
        recorder.kv_budget_estimate(budget)
        recorder.cudagraph_skip("enforce_eager")
        recorder.cudagraph_capture([1, 2, 4], pool_bytes=2**20)
        recorder.cudagraph_replay(batch_size=3, graph_batch_size=4, is_ahead=True)
        recorder.generate_start(2)
        recorder.generate_finish(2)

    records = recorded(start_up)
    heard = {ev.tag_of(record) for record in records if isinstance(record, ev.Event)}
    for recording in (
        *(Recording(BUSY), Recording(BUSY_MIXED)),
        Recording(BUSY, Interruption(4, "ran")),
    ):
        heard |= {ev.tag_of(record) for record in recording.records if isinstance(record, ev.Event)}
    assert heard == {*ev.EVENT_TYPES}

    estimate = next(record for record in records if isinstance(record, ev.KvBudgetEstimate))
    assert (estimate.total_gib, estimate.free_gib) == (16.0, 8.0)
    warmup = next(record for record in records if isinstance(record, ev.WarmupModel))
    assert warmup.num_tokens == 16
    replay = next(record for record in records if isinstance(record, ev.CudagraphReplay))
    assert replay.padding == 1


# -- what an observer must be ----------------------------------------------------------------------


def test_an_event_keeps_its_moment_though_the_engines_lists_go_on_living() -> None:
    seq = Sequence(0, [1, 2, 3], SamplingParams())
    pages = [4, 5]

    def speak(recorder: Recorder) -> None:
        recorder.request_enqueue(seq, waiting_len=1)
        recorder.blocks_allocate(seq, pages)
        seq.token_ids.append(9)
        pages.append(6)

    _, enqueued, allocated, _ = recorded(speak)
    assert isinstance(enqueued, ev.RequestEnqueue)
    assert enqueued.prompt_token_ids == [1, 2, 3]
    assert isinstance(allocated, ev.BlocksAllocate)
    assert allocated.block_ids == [[4, 5]]


def test_operations_of_one_kind_in_a_row_are_one_event() -> None:
    first, second = (Sequence(seq_id, [1], SamplingParams()) for seq_id in (0, 1))

    def speak(recorder: Recorder) -> None:
        for seq, page in ((first, 3), (first, 4), (second, 3)):
            recorder.blocks_share(seq, page)
        recorder.blocks_allocate(second, [5])
        recorder.blocks_share(first, 6)

    _, shared, allocated, again, _ = recorded(speak)
    assert isinstance(shared, ev.BlocksShare)
    assert (shared.seq_ids, shared.block_ids) == ([0, 1], [[3, 4], [3]])
    assert isinstance(allocated, ev.BlocksAllocate)
    assert isinstance(again, ev.BlocksShare)
    assert (again.seq_ids, again.block_ids) == ([0], [[6]])


def test_recording_changes_nothing_of_what_is_recorded() -> None:
    recorded_run, silent_run = Recording(BUSY).run, Run(BUSY).go()
    assert recorded_run.num_steps == silent_run.num_steps
    for seq_id, seq in silent_run.sequences.items():
        assert recorded_run.sequences[seq_id].token_ids == seq.token_ids


@pytest.mark.parametrize("message", ["no file \udcff", "text\nwith\x00 odd \u2028 letters"])
def test_an_error_with_any_message_can_be_recorded(message: str) -> None:
    """A file name that is no UTF-8 reaches Python, and an error's message, as a lone surrogate."""
    _, event, _ = recorded(lambda recorder: recorder.engine_error(OSError(message)))
    assert isinstance(event, ev.EngineError)
    assert event.message == message.encode("utf-8", "replace").decode("utf-8")


def test_whole_numbers_of_any_type_that_sampling_params_takes_can_be_recorded() -> None:
    """SamplingParams takes any whole number; an array library's are no `int`."""
    params = SamplingParams(max_tokens=np.int64(3), top_k=np.int32(2), seed=np.int64(7))  # type: ignore[arg-type]
    seq = Sequence(0, [1], params, seed=7)
    _, event, _ = recorded(lambda recorder: recorder.request_enqueue(seq, waiting_len=1))
    assert isinstance(event, ev.RequestEnqueue)
    assert (event.max_tokens, event.top_k, event.seed) == (3, 2, 7)


# -- an event that cannot be written ---------------------------------------------------------------


def strange_seq() -> Sequence:
    """A request of whose sampling params one cannot be encoded; the engine's own door is shut."""
    params = SamplingParams(max_tokens=3)
    object.__setattr__(params, "stop", (object(),))
    return Sequence(7, [1], params)


def listening(
    processors: Iterable[Processor] = (), tap: Callable[[list[ev.Event]], None] | None = None
) -> tuple[Recorder, MemoryFile, list[str]]:
    """A recorder, where its lines go, and what it reports."""
    file, reports = MemoryFile(), list[str]()
    sink = Sink(file, report=reports.append)
    return Recorder(sink, processors=processors, tap=tap), file, reports


def read_with_gaps(data: bytes) -> tuple[list[Record], list[str]]:
    warnings: list[str] = []
    return list(read_trace(io.BytesIO(data), warn=warnings.append)), warnings


def test_an_event_that_cannot_be_encoded_is_lost_alone_and_said_once() -> None:
    recorder, file, reports = listening()
    recorder.trace.write_header({}, {})
    for _ in range(2):
        recorder.generate_start(1)
        recorder.request_enqueue(strange_seq(), waiting_len=1)
        recorder.generate_finish(0)  # drains
    recorder.close()
    records, [warning] = read_with_gaps(file.contents)
    assert [ev.tag_of(r) for r in records if isinstance(r, ev.Event)] == [
        "GENERATE_START",
        "GENERATE_FINISH",
    ] * 2
    assert warning.startswith("the trace: 2 events are missing")
    assert records[-1] == Footer(event_id=7, num_events=6, exit="ok")
    assert recorder.trace.num_lost == 2
    [report] = reports
    assert report.startswith("REQUEST_ENQUEUE cannot be written and is missing in the trace (Type")


@pytest.mark.parametrize("tag", ["REQUEST_ENQUEUE", "STEP_END"])
def test_a_processor_that_fails_loses_what_it_fails_on(tag: str) -> None:
    class UnreadableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def fail(_logger: object, _method: str, event_dict: EventDict) -> EventDict:
        if event_dict["event"] == tag:
            raise UnreadableError
        return event_dict

    recorder, file, reports = listening([fail])
    run = Run(BUSY, recorder).go()
    recorder.close()
    undisturbed = Run(BUSY).go()
    for seq_id, seq in undisturbed.sequences.items():
        assert run.sequences[seq_id].token_ids == seq.token_ids
    records, _ = read_with_gaps(file.contents)
    assert isinstance(records[0], Header)
    assert isinstance(records[-1], Footer)
    assert not any(isinstance(r, ev.Event) and ev.tag_of(r) == tag for r in records)
    [report] = reports
    assert "its message cannot be read: RuntimeError" in report


@pytest.mark.parametrize(
    "tag", ["SAMPLE_TOKENS", "GENERATE_FINISH", "TRACE_HEADER", "TRACE_FOOTER"]
)
@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, GeneratorExit])
def test_whatever_a_processor_raises_the_trace_ends_with_a_footer(
    error: type[BaseException], tag: str
) -> None:
    calls = itertools.count()

    def fail(_logger: object, _method: str, event_dict: EventDict) -> EventDict:
        if event_dict["event"] == tag and next(calls) == 0:
            raise error
        return event_dict

    def go() -> None:
        recorder.trace.write_header({}, {})
        recorder.generate_start(1)
        recorder.trace.add(
            new(ev.SampleTokens)(seq_ids=[], temperatures=[], token_ids=[]), "decode"
        )
        recorder.generate_finish(1)
        recorder.close()

    recorder, file, reports = listening([fail])
    with pytest.raises(error):
        go()
    recorder.close()
    recorder.close()
    records, _ = read_with_gaps(file.contents)
    assert isinstance(records[0], Header)
    assert [isinstance(record, Footer) for record in records].index(True) == len(records) - 1
    assert len(reports) == 1
    footer = records[-1]
    assert isinstance(footer, Footer)
    num_there = sum(isinstance(record, ev.Event) for record in records)
    assert footer.num_events - num_there == (tag in ev.EVENT_TYPES)


def test_an_engine_goes_on_after_a_processor_was_cancelled(tmp_path: Path) -> None:
    calls = itertools.count()

    def fail(_logger: object, _method: str, event_dict: EventDict) -> EventDict:
        if event_dict["event"] == "SAMPLE_TOKENS" and next(calls) == 0:
            raise asyncio.CancelledError
        return event_dict

    with record(tmp_path / "trace.jsonl", processors=[fail]) as recorder:
        engine = make_engine(BUSY.settings, recorder)
        right = make_engine(BUSY.settings).generate([[1, 2]])
        with pytest.raises(asyncio.CancelledError):
            engine.generate([[1, 2]])
        assert [output.text for output in engine.generate([[1, 2]])] == [right[0].text]
    records, _ = read_with_gaps((tmp_path / "trace.jsonl").read_bytes())
    assert isinstance(records[-1], Footer)
    assert records[-1].exit == "ok"


def test_events_that_an_interruption_keeps_from_being_written_are_counted() -> None:
    def fail(_logger: object, _method: str, event_dict: EventDict) -> EventDict:
        if event_dict["event"] == "SAMPLE_TOKENS":
            raise KeyboardInterrupt
        return event_dict

    recorder, file, reports = listening([fail])
    recorder.trace.write_header({}, {})
    recorder.generate_start(1)
    recorder.trace.add(new(ev.SampleTokens)(seq_ids=[], temperatures=[], token_ids=[]), "decode")
    with pytest.raises(KeyboardInterrupt):
        recorder.close("interrupted")
    recorder.close()
    records, warnings = read_with_gaps(file.contents)
    assert records[-1] == Footer(event_id=3, num_events=2, exit="interrupted")
    assert any("1 events are missing" in warning for warning in warnings), warnings
    assert reports == []


def test_a_tap_that_fails_is_heard_once_and_the_trace_is_whole() -> None:
    is_broken = True

    def tap(_events: list[ev.Event]) -> None:
        if is_broken:
            raise LookupError

    recorder, file, reports = listening(tap=tap)
    recorder.trace.write_header({}, {})
    recorder.generate_start(1)
    recorder.generate_finish(0)
    is_broken = False
    recorder.generate_start(1)
    recorder.generate_finish(0)
    is_broken = True
    recorder.generate_start(1)
    recorder.close()
    assert len(read(file.contents)) == 5 + 2
    assert isinstance(recorder.trace.tap_error, LookupError)
    assert [report.split(":")[0] for report in reports] == [
        "what watches the trace raised LookupError"
    ]


def test_a_header_keeps_what_can_be_encoded() -> None:
    recorder, file, reports = listening()
    recorder.trace.write_header(
        {"seed": 1j, "policy": "mixed"}, {"odd": object(), "name": "\udcff"}
    )
    recorder.close()
    header, _ = read(file.contents)
    assert isinstance(header, Header)
    assert (header.config, header.model) == ({"policy": "mixed"}, {"name": "?"})
    assert [report.split(" cannot")[0] for report in reports] == ["the header's odd"]


def test_an_engine_goes_on_after_an_event_was_lost(tmp_path: Path) -> None:
    def fail(_logger: object, _method: str, event_dict: EventDict) -> EventDict:
        if event_dict["event"] == "REQUEST_ENQUEUE":
            raise ValueError
        return event_dict

    with record(tmp_path / "trace.jsonl", processors=[fail]) as recorder:
        engine = make_engine(BUSY.settings, recorder)
        right = make_engine(BUSY.settings).generate([[1, 2]])
        for _ in range(2):
            assert [output.text for output in engine.generate([[1, 2]])] == [right[0].text]
    records, _ = read_with_gaps((tmp_path / "trace.jsonl").read_bytes())
    assert isinstance(records[-1], Footer)


def test_an_error_without_a_message_can_be_recorded() -> None:
    class UnreadableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    _, event, _ = recorded(lambda recorder: recorder.engine_error(UnreadableError()))
    assert isinstance(event, ev.EngineError)
    assert event.message == "(its message cannot be read: RuntimeError)"


def test_a_recorder_that_is_closed_while_another_thread_writes_is_whole() -> None:
    for _ in range(20):
        recorder, file, _ = listening()
        recorder.trace.write_header({}, {})
        failures: list[BaseException] = []

        def write(recorder: Recorder = recorder, failures: list[BaseException] = failures) -> None:
            try:
                for _ in range(200):
                    recorder.generate_start(1)
                    recorder.generate_finish(0)
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        recorder.close()
        thread.join()
        assert failures == []
        assert isinstance(read(file.contents)[-1], Footer)


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "exit_"), [(None, "ok"), (ValueError, "error"), (KeyboardInterrupt, "interrupted")]
)
def test_the_footer_says_how_the_run_ended(
    tmp_path: Path, error: type[BaseException] | None, exit_: str
) -> None:
    path = tmp_path / "trace.jsonl"

    def run() -> None:
        with record(path) as recorder:
            make_engine(BUSY.settings, recorder)
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    footer = read(path.read_bytes())[-1]
    assert isinstance(footer, Footer)
    assert footer.exit == exit_


def test_a_trace_without_an_engine_is_a_trace_all_the_same(tmp_path: Path) -> None:
    with record(tmp_path / "trace.jsonl"):
        pass
    header, footer = read((tmp_path / "trace.jsonl").read_bytes())
    assert isinstance(header, Header)
    assert footer == Footer(event_id=1, num_events=0, exit="ok")


def test_closing_twice_writes_one_footer() -> None:
    file = MemoryFile()
    recorder = Recorder(Sink(file))
    recorder.close()
    recorder.close("error")
    assert len(read(file.contents)) == 2


def test_a_recorder_records_one_engine() -> None:
    recorder = Recorder(Sink(MemoryFile()))
    make_engine(BUSY.settings, recorder)
    with pytest.raises(ValueError, match=r"one record\(\) for each LLM"):
        make_engine(BUSY.settings, recorder)


# -- after the run, and before it ------------------------------------------------------------------


def test_an_engine_goes_on_after_its_trace_is_closed_and_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with record(tmp_path / "trace.jsonl") as recorder:
        engine = make_engine(Settings(), recorder)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for _ in range(2):
        assert len(engine.generate([[1, 2]], params)[0]["token_ids"]) == 3
    assert capsys.readouterr().err.count("the trace is closed") == 1
    assert len(list(read_trace(tmp_path / "trace.jsonl", warn=pytest.fail))) > 2


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
