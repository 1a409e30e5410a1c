"""From event to file: processors, structlog, compression, what is in the way, failing disks."""

from __future__ import annotations

import gzip
import io
from typing import TYPE_CHECKING

import msgspec
import pytest
import structlog
import zstandard

from nvtrace import events as ev
from nvtrace.check import check
from nvtrace.envelope import Footer, Header
from nvtrace.files import free_names
from nvtrace.pipeline import Sink, open_sink
from nvtrace.reader import read_trace
from nvtrace.recorder import Recorder, record
from nvtrace.replay import InconsistentTraceError
from nvtrace.validate import Validator, validate
from support.recording import BUSY
from support.workload import MemoryFile, Run

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from structlog.typing import EventDict, Processor

    from nvtrace.envelope import Record
    from nvtrace.files import Existing

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")


def read(source: Path | bytes) -> list[Record]:
    """Read a trace that must be without fault."""
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    return list(read_trace(stream, warn=pytest.fail))


def run_busy(path: Path, existing: Existing = "keep") -> Recorder:
    with record(path, existing=existing) as recorder:
        Run(BUSY, recorder).go()
    return recorder


def trace_of_busy(processors: Iterable[Processor] = ()) -> bytes:
    file = MemoryFile()
    recorder = Recorder(Sink(file), processors=processors)
    Run(BUSY, recorder).go()
    recorder.close()
    return file.contents


# -- processors ------------------------------------------------------------------------------------


def test_processors_see_every_line_with_its_name_and_its_struct() -> None:
    seen: list[tuple[str, object]] = []

    def watch(_logger: object, _method: str, event_dict: EventDict) -> EventDict:
        seen.append((event_dict["event"], event_dict["record"]))
        return event_dict

    _, *records = read(trace_of_busy([watch]))
    assert [record for _, record in seen[1:]] == records
    assert seen[0][0] == "TRACE_HEADER"
    assert seen[-1][0] == "TRACE_FOOTER"
    for name, struct in seen[1:-1]:
        assert isinstance(struct, ev.Event)
        assert name == ev.tag_of(struct)


def test_a_processor_may_drop_events_and_the_numbers_show_it() -> None:
    def drop_decode_tensors(_logger: object, _method: str, event_dict: EventDict) -> EventDict:
        if event_dict["event"] == "PREPARE_DECODE_TENSORS":
            raise structlog.DropEvent
        return event_dict

    whole = [r for r in read(trace_of_busy()) if isinstance(r, ev.Event)]
    dropped = trace_of_busy([drop_decode_tensors])
    warnings: list[str] = []
    records = read_trace(io.BytesIO(dropped), warn=warnings.append)
    rest = [record for record in records if isinstance(record, ev.Event)]
    expected = [r.event_id for r in whole if not isinstance(r, ev.PrepareDecodeTensors)]
    assert [r.event_id for r in rest] == expected
    assert warnings == ["the trace: the processors of record() dropped some events"]


def keep_only(*names: str) -> Processor:
    def processor(_logger: object, _method: str, event_dict: EventDict) -> EventDict:
        if event_dict.pop("event") not in names:
            raise structlog.DropEvent
        return event_dict

    return processor


@pytest.mark.parametrize("kept", [("STEP_END", "PREEMPT"), ("TRACE_HEADER",), ()])
def test_header_and_footer_pass_a_processor_that_drops_them(
    kept: tuple[str, ...], tmp_path: Path
) -> None:
    num_events = len(read(trace_of_busy())) - 2
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(trace_of_busy([keep_only(*kept)]))
    warnings: list[str] = []
    header, *events, footer = read_trace(trace, warn=warnings.append)
    assert isinstance(header, Header)
    assert header.is_filtered
    assert isinstance(footer, Footer)
    assert {ev.tag_of(event) for event in events if isinstance(event, ev.Event)} <= {*kept}
    assert (footer.num_events, footer.num_dropped) == (num_events, num_events - len(events))
    assert warnings == [f"{trace}: the processors of record() dropped some events"]
    heard: list[str] = []
    assert not list(validate(trace, Validator(), warn=heard.append))
    assert heard == warnings
    with pytest.raises(InconsistentTraceError, match="a check needs all of them"):
        list(check(read_trace(trace)))


@pytest.mark.parametrize(
    "num_processors", [1, 2], ids=["alone", "in front of another that does the same"]
)
def test_header_and_footer_pass_a_processor_that_was_written_for_events(
    num_processors: int,
) -> None:
    def until_step_3(_logger: object, _method: str, event_dict: EventDict) -> EventDict:
        event_dict["seen"] = True  # what it changed before it failed does not count
        record = event_dict["record"]
        if record.step and record.step > 3:
            raise structlog.DropEvent
        return event_dict

    file = MemoryFile()
    reports: list[str] = []
    recorder = Recorder(
        Sink(file, report=reports.append), processors=[until_step_3] * num_processors
    )
    Run(BUSY, recorder).go()
    recorder.close()
    assert (reports, recorder.trace.num_lost) == ([], 0)
    header, *events, footer = read_trace(io.BytesIO(file.contents), warn=reports.append)
    assert isinstance(header, Header)
    assert isinstance(footer, Footer)
    assert footer.num_events - footer.num_dropped == len(events)
    assert {event.step for event in events if isinstance(event, ev.Event)} <= {None, 1, 2, 3}
    assert reports == ["the trace: the processors of record() dropped some events"]


def test_a_trace_that_was_filtered_and_is_damaged_says_so(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = trace_of_busy([keep_only("STEP_END", "PREEMPT")]).splitlines(keepends=True)
    trace.write_bytes(b"".join([*lines[:5], *lines[7:]]))
    dropped = f"{trace}: the processors of record() dropped some events"
    warnings: list[str] = []
    list(read_trace(trace, warn=warnings.append))
    assert warnings == [dropped, f"{trace}: 2 events are missing, according to the event ids"]
    assert [fault.code for fault in validate(trace, Validator(), warn=lambda _warning: None)] == [
        "num_events"
    ]

    trace.write_bytes(b"".join(lines[:5]))  # a run that was cut off: all gaps may be meant
    warnings.clear()
    list(read_trace(trace, warn=warnings.append))
    assert warnings == [
        dropped,
        f"{trace} has no footer: the run was cut off; everything it wrote was read",
    ]


def test_a_trace_that_nobody_filtered_says_nothing_of_it() -> None:
    header, *_, footer = read(trace_of_busy())
    assert isinstance(header, Header)
    assert isinstance(footer, Footer)
    assert (header.is_filtered, footer.num_dropped) == (False, 0)


def test_a_processor_may_put_another_record_in_place() -> None:
    def hide_prompts(_logger: object, _method: str, event_dict: EventDict) -> EventDict:
        record = event_dict["record"]
        if isinstance(record, ev.RequestEnqueue):
            event_dict["record"] = msgspec.structs.replace(record, prompt_token_ids=[])
        return event_dict

    enqueued = [r for r in read(trace_of_busy([hide_prompts])) if isinstance(r, ev.RequestEnqueue)]
    assert len(enqueued) == 5
    assert all(event.prompt_token_ids == [] and event.prompt_len for event in enqueued)


def test_processors_run_in_the_order_in_which_they_are_given() -> None:
    order: list[str] = []

    def named(name: str) -> Processor:
        def processor(_logger: object, _method: str, event_dict: EventDict) -> EventDict:
            order.append(name)
            return event_dict

        return processor

    trace_of_busy([named("first"), named("second")])
    assert order[:4] == ["first", "second", "first", "second"]


def test_an_applications_own_structlog_is_neither_used_nor_changed() -> None:
    assert not structlog.is_configured()
    plain = trace_of_busy()
    assert not structlog.is_configured()

    def never(_logger: object, _method: str, _event_dict: EventDict) -> EventDict:
        pytest.fail("a trace went through the application's own logging")

    structlog.configure(processors=[never])
    try:
        before = structlog.get_config()
        assert len(read(trace_of_busy())) == len(read(plain))
        assert structlog.get_config() == before
    finally:
        structlog.reset_defaults()


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_trace_comes_back_from_each_kind_of_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"trace{ending}"
    seen: list[ev.Event] = []
    with record(path, tap=seen.extend) as recorder:
        Run(BUSY, recorder).go()
    header, *events, footer = read(path)
    assert events == seen
    assert isinstance(header, Header)
    assert isinstance(footer, Footer)


def test_compressed_files_are_what_their_endings_say(tmp_path: Path) -> None:
    for ending in ENDINGS:
        run_busy(tmp_path / f"trace{ending}")
    plain = (tmp_path / "trace.jsonl").read_bytes()
    with gzip.open(tmp_path / "trace.jsonl.gz") as file:
        assert file.read().count(b"\n") == plain.count(b"\n")
    compressed = (tmp_path / "trace.jsonl.zst").read_bytes()
    unpacked = zstandard.ZstdDecompressor().stream_reader(compressed).read()
    assert unpacked.count(b"\n") == plain.count(b"\n")
    assert len(compressed) < len(plain) / 4


def test_every_line_is_one_json_object_with_its_event_first(tmp_path: Path) -> None:
    run_busy(tmp_path / "trace.jsonl")
    for line in (tmp_path / "trace.jsonl").read_text(encoding="utf-8").splitlines():
        fields = msgspec.json.decode(line, type=dict[str, object])
        assert next(iter(fields)) == "event"


def test_an_earlier_trace_is_kept_under_another_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    assert run_busy(path).kept is None
    first = path.read_bytes()
    assert run_busy(path).kept == tmp_path / "trace.1.jsonl"
    assert (tmp_path / "trace.1.jsonl").read_bytes() == first
    second = path.read_bytes()
    assert run_busy(path).kept == tmp_path / "trace.2.jsonl"
    assert (tmp_path / "trace.2.jsonl").read_bytes() == second
    assert len({first, second, path.read_bytes()}) == 3


def test_an_earlier_trace_is_replaced_if_told_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("old")
    assert run_busy(path, "replace").kept is None
    assert isinstance(read(path)[0], Header)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.jsonl"]


def test_an_earlier_trace_can_be_a_reason_not_to_start(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("old")
    with pytest.raises(FileExistsError, match="give another file"):
        run_busy(path, "error")
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("name", "free"),
    [
        ("trace.jsonl", "trace.1.jsonl"),
        ("trace.jsonl.zst", "trace.1.jsonl.zst"),
        ("trace", "trace.1"),
    ],
)
def test_a_free_name_keeps_every_ending(tmp_path: Path, name: str, free: str) -> None:
    assert next(free_names(tmp_path / name)) == tmp_path / free


def test_a_folder_that_is_not_there_is_said_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), record(tmp_path / "nowhere" / "trace.jsonl"):
        pytest.fail("recording began without a file")


# -- flushing --------------------------------------------------------------------------------------


def test_every_ended_step_is_in_the_file_while_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    num_steps = 0

    def look() -> None:
        nonlocal num_steps
        num_steps += 1
        ends = [r for r in read_trace(path) if isinstance(r, ev.StepEnd)]
        assert [end.step for end in ends] == list(range(1, num_steps + 1))

    with record(path) as recorder:
        Run(BUSY, recorder).go(look)
    assert num_steps > 10


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_compressed_file_can_be_read_up_to_its_last_flush(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"trace{ending}"
    sink, _ = open_sink(path)
    sink._seconds_between_flushes = 0.0
    recorder = Recorder(sink)
    run = Run(BUSY, recorder)
    num_ends: list[int] = []
    run.go(lambda: num_ends.append(sum(isinstance(r, ev.StepEnd) for r in read_trace(path))))
    recorder.close()
    assert num_ends == list(range(1, run.num_steps + 1))


def test_a_tap_hears_each_steps_events_once_they_are_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    heard: list[list[ev.Event]] = []

    def tap(events: list[ev.Event]) -> None:
        heard.append(events)
        assert list(read_trace(path))[-1] == events[-1]

    with record(path, tap=tap) as recorder:
        Run(BUSY, recorder).go()
    assert [event for events in heard for event in events] == read(path)[1:-1]
    assert all(len({event.step for event in events}) == 1 for events in heard)
