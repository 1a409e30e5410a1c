"""nvtrace stats: each definition worked by hand, sums over random runs, and what is shown."""

from __future__ import annotations

import gzip
import io
import json
import random
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from nvtrace import events as ev
from nvtrace.distribution import Distribution
from nvtrace.measure import Measure
from nvtrace.metrics import PhaseMetrics, RequestMetrics, RunMetrics, facts, metric_names
from nvtrace.reader import read_trace
from nvtrace.replay import InconsistentTraceError
from nvtrace_cli.views import reading
from support.cli import ROOT, call, environment, spawn
from support.recording import BUSY, BUSY_MIXED, Interruption, Recording
from support.workload import Workload, workloads

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

STEP_TIMES = ("wall_ns", "schedule_ns", "prepare_ns", "forward_ns", "sample_ns", "postprocess_ns")


class Story:
    """A trace written by hand: each method is one moment, at a time that is given."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - fields of ENGINE_INIT
        self.events: list[ev.Event] = []
        self._step: int | None = None
        self._last_step = 0
        asked = {"max_num_batched_tokens": 100, "enable_prefix_caching": True} | settings
        words = dict.fromkeys(("model", "device", "dtype", "attention_backend", "policy"), "")
        numbers = dict.fromkeys(("tp_size", "max_num_seqs", "max_model_len", "seed"), 1)
        self._add(ev.EngineInit, 0, block_size=4, enforce_eager=False, **words, **numbers, **asked)
        self._add(ev.EngineReady, 0, num_kvcache_blocks=10, eos_token_ids=[], duration_ns=0)

    def _add(self, cls: type[ev.Event], now: int, **fields: Any) -> Story:  # noqa: ANN401 - the same
        number = len(self.events) + 1
        envelope: dict[str, Any] = {
            "event_id": number,
            "ts_ns": now,
            "step": self._step,
            "phase": "decode",
        }
        self.events.append(cls(**envelope, **fields))
        return self

    def arrive(self, now: int, seq_id: int = 0, prompt_len: int = 8) -> Story:
        return self._add(
            ev.RequestEnqueue,
            now,
            seq_id=seq_id,
            prompt_len=prompt_len,
            max_tokens=9,
            temperature=0.0,
            top_k=None,
            top_p=1.0,
            seed=0,
            ignore_eos=True,
            waiting_len=1,
            prompt_token_ids=[1] * prompt_len,
        )

    def _move(self, now: int, seq_id: int, reason: str, previous: str, status: str) -> Story:
        return self._add(
            ev.StateTransition,
            now,
            seq_id=seq_id,
            reason=reason,
            previous=previous,
            status=status,
            token_id=None,
            num_completion_tokens=0,
            max_tokens=9,
        )

    def admit(self, now: int, seq_id: int = 0) -> Story:
        self._begin()
        return self._move(now, seq_id, "admitted", "WAITING", "RUNNING")

    def preempt(self, now: int, seq_id: int = 0, num_tokens: int = 8) -> Story:
        self._begin()
        fields = {"seq_id": seq_id, "for_seq_id": 9, "num_blocks_freed": 1}
        self._add(ev.Preempt, now, num_tokens_to_recompute=num_tokens, **fields)
        return self._move(now, seq_id, "preempted", "RUNNING", "WAITING")

    def abort(self, now: int, seq_id: int = 0, previous: str = "RUNNING") -> Story:
        return self._move(now, seq_id, "aborted", previous, "FINISHED")

    def prefill(self, now: int, cached: dict[int, int], free_blocks: int = 8) -> Story:
        self._begin()
        num = len(cached)
        return self._add(
            ev.SchedulePrefill,
            now,
            reason="waiting_admissible",
            engine_step=self._last_step,
            scheduled=num,
            seq_ids=list(cached),
            num_scheduled_tokens=[8] * num,
            num_computed_tokens=list(cached.values()),
            num_cached_tokens=list(cached.values()),
            num_batched_tokens=8 * num,
            token_budget=100,
            waiting_len=0,
            running_len=num,
            free_blocks=free_blocks,
        )

    def replay(self, now: int, batch_size: int, graph_batch_size: int) -> Story:
        self._begin()
        sizes = {"batch_size": batch_size, "graph_batch_size": graph_batch_size}
        padding = graph_batch_size - batch_size
        return self._add(ev.CudagraphReplay, now, padding=padding, is_ahead=False, **sizes)

    def draw(self, now: int, *seq_ids: int) -> Story:
        self._begin()
        num = len(seq_ids)
        temperatures, token_ids = [0.0] * num, [1] * num
        fields = {"temperatures": temperatures, "token_ids": token_ids}
        return self._add(ev.SampleTokens, now, seq_ids=list(seq_ids), **fields)

    def finish(self, now: int, seq_id: int = 0) -> Story:
        return self._move(now, seq_id, "max_tokens", "RUNNING", "FINISHED")

    def end(
        self, now: int, phase: str = "decode", num_seqs: int = 1, gpu_ns: int | None = None
    ) -> Story:
        self._begin()
        counts = dict.fromkeys(("waiting_len", "running_len", "free_blocks"), 0)
        times = dict.fromkeys(STEP_TIMES, 2)
        self._add(
            ev.StepEnd,
            now,
            batch_phase=phase,
            num_seqs=num_seqs,
            num_batched_tokens=num_seqs * (8 if phase == "prefill" else 1),
            num_tokens_stat=0,
            finished=[],
            gpu_ns=gpu_ns,
            **counts,
            **times,
        )
        self._step = None
        return self

    def fail(self, now: int, *seq_ids: int) -> Story:
        self._add(ev.EngineReset, now, seq_ids=list(seq_ids), num_tokens=[8] * len(seq_ids))
        self._step = None
        return self

    def _begin(self) -> None:
        if self._step is None:
            self._last_step += 1
            self._step = self._last_step


def measure(records: Iterable[Any]) -> tuple[list[RequestMetrics], RunMetrics]:
    measuring = Measure()
    requests = [request for record in records for request in measuring.apply(record)]
    return requests, measuring.run()


def only(story: Story) -> RequestMetrics:
    (request,) = measure(story.events)[0]
    return request


def phases_sum(request: RequestMetrics) -> int:
    """Every nanosecond of a request's life, in one of the phases' own times or preempted."""
    prefill = (request.request_prefill_time_ns or 0) - request.preempted_in_prefill_ns
    decode = (request.request_decode_time_ns or 0) - request.preempted_in_decode_ns
    return request.request_queue_time_ns + prefill + decode + request.request_preempted_time_ns


# -- one request, by hand --------------------------------------------------------------------------


def test_three_tokens_worked_by_hand() -> None:
    story = Story().arrive(100).admit(110).prefill(111, {0: 0}).draw(125, 0).end(130, "prefill")
    story.draw(138, 0).end(140).draw(158, 0).finish(159).end(160)
    request = only(story)
    assert request.token_ns == (130, 140, 160)
    assert request.time_to_first_token_ns == 130 - 100
    assert request.inter_token_latencies_ns == (10, 20)
    assert request.time_per_output_token_ns == (160 - 130) / 2
    assert request.request_queue_time_ns == 110 - 100
    assert request.request_prefill_time_ns == 130 - 110
    assert request.request_decode_time_ns == 160 - 130
    assert request.request_inference_time_ns == 160 - 110
    assert request.e2e_request_latency_ns == 160 - 100
    assert request.request_preempted_time_ns == 0
    assert (request.finish_reason, request.num_generation_tokens) == ("max_tokens", 3)


def test_a_one_token_answer_has_no_time_per_output_token() -> None:
    story = Story().arrive(0).admit(1).prefill(2, {0: 0}).draw(8, 0).finish(9, 0).end(10, "prefill")
    request = only(story)
    assert request.time_per_output_token_ns is None
    assert request.inter_token_latencies_ns == ()
    assert (request.time_to_first_token_ns, request.request_decode_time_ns) == (10, 0)
    run = measure(story.events)[1]
    assert run.time_per_output_token_ns is None
    assert run.inter_token_latency_ns is None
    assert run.request_decode_time_ns is not None


def test_a_preemption_inside_decode_lengthens_decode_and_one_gap() -> None:
    story = Story().arrive(0).admit(10).prefill(11, {0: 0}).draw(18, 0).end(20, "prefill")
    story.preempt(25, num_tokens=8).end(30)
    story.admit(45).prefill(46, {0: 4}).draw(55, 0).finish(56).end(60, "prefill")
    request = only(story)
    assert request.request_prefill_time_ns == 20 - 10
    assert request.request_decode_time_ns == 60 - 20
    assert request.inter_token_latencies_ns == (40,)
    assert (request.preempted_in_prefill_ns, request.preempted_in_decode_ns) == (0, 45 - 25)
    assert (request.num_preemptions, request.num_recomputed_tokens) == (1, 8 - 4)
    assert request.num_cached_tokens == 0, "what was cached later is no prefix hit of the prompt"
    assert phases_sum(request) == request.e2e_request_latency_ns == 60


def test_a_preemption_inside_prefill_lengthens_prefill_and_ttft() -> None:
    story = Story().arrive(0).admit(10).prefill(11, {0: 0}).end(20, "prefill")  # a chunk
    story.preempt(25, num_tokens=4).end(30)
    story.admit(50).prefill(51, {0: 0}).draw(65, 0).finish(66).end(70, "prefill")
    request = only(story)
    assert request.request_queue_time_ns == 10, "only the first stay in the queue counts"
    assert request.request_prefill_time_ns == 70 - 10
    assert request.time_to_first_token_ns == 70
    assert (request.preempted_in_prefill_ns, request.preempted_in_decode_ns) == (50 - 25, 0)
    assert request.num_recomputed_tokens == 4
    assert phases_sum(request) == request.e2e_request_latency_ns == 70


def test_an_abort_in_the_queue_leaves_only_queue_time() -> None:
    request = only(Story().arrive(5).abort(25, previous="WAITING"))
    assert (request.request_queue_time_ns, request.e2e_request_latency_ns) == (20, 20)
    assert request.request_prefill_time_ns is None
    assert request.request_inference_time_ns is None
    assert request.request_decode_time_ns is None
    assert request.time_to_first_token_ns is None


def test_an_abort_while_preempted_counts_the_wait_until_then() -> None:
    story = Story().arrive(0).admit(1).prefill(2, {0: 0}).draw(8, 0).end(10, "prefill")
    story.preempt(12).end(20).abort(50, previous="WAITING")
    request = only(story)
    assert request.preempted_in_decode_ns == 50 - 12
    assert request.request_decode_time_ns == 50 - 10
    assert phases_sum(request) == 50


def test_aborted_requests_are_no_part_of_the_runs_latencies_but_their_tokens_are() -> None:
    story = Story().arrive(0).admit(1).prefill(2, {0: 0}).draw(8, 0).end(10, "prefill").abort(12)
    run = measure(story.events)[1]
    assert (run.num_finished, run.num_aborted) == (0, 1)
    assert run.e2e_request_latency_ns is None
    assert run.time_to_first_token_ns is not None
    assert run.time_to_first_token_ns.mean == 10


def test_a_token_of_a_step_that_broke_off_does_not_count() -> None:
    story = Story().arrive(0).admit(1).prefill(2, {0: 0}).draw(8, 0).finish(9).fail(11, 0)
    request = only(story)
    assert (request.finish_reason, request.num_generation_tokens) == ("aborted", 0)
    assert request.finished_ns == 11
    assert measure(story.events)[1].num_generation_tokens == 0


def test_prefix_hits_are_those_of_the_first_admission() -> None:
    story = Story().arrive(0, 0, 8).arrive(0, 1, 12).admit(1, 0).admit(1, 1)
    story.prefill(2, {0: 0, 1: 8}).draw(3, 0, 1).finish(4, 0).finish(4, 1).end(5, "prefill", 2)
    requests, run = measure(story.events)
    assert [request.num_cached_tokens for request in requests] == [0, 8]
    assert (run.prefix_cache_queries, run.prefix_cache_hits) == (20, 8)
    assert run.prefix_cache_hit_rate == 8 / 20


def test_a_prefix_cache_that_is_off_has_no_hit_rate() -> None:
    story = Story(enable_prefix_caching=False).arrive(0).admit(1).prefill(2, {0: 0})
    run = measure(story.draw(3, 0).finish(4).end(5, "prefill").events)[1]
    assert (run.prefix_cache_queries, run.prefix_cache_hit_rate) == (0, None)


# -- a run, by hand --------------------------------------------------------------------------------


def test_a_run_worked_by_hand() -> None:
    second = 1_000_000_000
    story = Story().arrive(second, 0).arrive(second, 1).arrive(second, 2).admit(second, 0)
    story.admit(second, 1).prefill(second, {0: 0, 1: 0}, free_blocks=6)
    story.draw(second, 0, 1).end(2 * second, "prefill", 2)
    story.replay(2 * second, 2, 4).draw(2 * second, 0, 1).finish(2 * second, 1)
    story.end(3 * second, "decode", 2, gpu_ns=50)
    story.replay(3 * second, 1, 1).draw(3 * second, 0).finish(3 * second, 0)
    run = measure(story.end(5 * second, "decode", 1, gpu_ns=30).events)[1]
    assert (run.num_requests, run.num_finished, run.num_unfinished) == (3, 2, 1)
    assert (run.num_prompt_tokens, run.num_generation_tokens) == (16, 5)
    assert run.duration_ns == 4 * second
    assert (run.request_throughput, run.output_throughput) == (2 / 4, 5 / 4)
    assert run.total_token_throughput == (16 + 5) / 4
    assert run.phases == {
        "prefill": PhaseMetrics(1, 2, 16, 2, None),
        "decode": PhaseMetrics(2, 3, 3, 4, 80),
    }
    assert run.step_time_ns == 6
    assert run.batch_efficiency == 3 / (2 * 2)
    assert run.token_budget_use == 16 / 100
    assert run.graph_padding == 2 / 5
    assert (run.kv_cache_usage, run.max_kv_cache_usage) == (4 / 10, 4 / 10)


def test_nothing_measured_is_none_and_not_0() -> None:
    run = measure(Story().events)[1]
    nothing = {name for name, value in facts(run).items() if value is None}
    assert nothing >= {
        *("request_throughput", "output_throughput", "total_token_throughput"),
        *("batch_efficiency", "token_budget_use", "graph_padding", "kv_cache_usage"),
        *("prefix_cache_hit_rate", "time_to_first_token_ns", "e2e_request_latency_ns"),
    }


def test_an_event_about_nobodys_request_is_refused() -> None:
    with pytest.raises(InconsistentTraceError, match="request 7"):
        measure(Story().admit(1, 7).events)


# -- distributions ---------------------------------------------------------------------------------


def test_percentiles_are_linear_between_neighbours() -> None:
    distribution = Distribution()
    for value in (40, 10, 20, 30):
        distribution.add(value)
    spread = distribution.spread()
    assert spread is not None
    assert (spread.count, spread.mean, spread.min, spread.max) == (4, 25, 10, 40)
    assert (spread.p50, spread.p90) == (25, 37)
    assert spread.p99 == pytest.approx(39.7)


def test_no_values_have_no_spread() -> None:
    assert Distribution().spread() is None


@given(st.lists(st.integers(0, 10**12), min_size=2, max_size=60))
def test_percentiles_are_the_standard_librarys(values: list[int]) -> None:
    distribution = Distribution()
    for value in values:
        distribution.add(value)
    spread = distribution.spread()
    assert spread is not None
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert [spread.p50, spread.p90, spread.p95, spread.p99] == pytest.approx(
        [cuts[49], cuts[89], cuts[94], cuts[98]]
    )


def test_many_different_values_take_bounded_memory_and_stay_within_a_thousandth() -> None:
    draw = random.Random(0)
    values = [int(draw.lognormvariate(15, 2)) for _ in range(20_000)]
    distribution = Distribution(most_values=5_000)
    for value in values:
        distribution.add(value)
    spread, cuts = distribution.spread(), statistics.quantiles(values, n=100, method="inclusive")
    assert spread is not None
    assert len(distribution._counts) < 20_000 / 2
    assert (spread.count, spread.min, spread.max) == (20_000, min(values), max(values))
    assert spread.mean == pytest.approx(statistics.fmean(values))
    assert [spread.p50, spread.p90, spread.p99] == pytest.approx(
        [cuts[49], cuts[89], cuts[98]], rel=1e-3
    )


# -- random runs -----------------------------------------------------------------------------------


@given(workloads())
@example(BUSY)
@example(BUSY_MIXED)
def test_queue_prefill_decode_and_preempted_time_add_up_to_the_whole(workload: Workload) -> None:
    recording = Recording(workload)
    requests, run = measure(recording.records)
    assert {request.seq_id for request in requests} == set(recording.run.sequences)
    for request in requests:
        assert phases_sum(request) == request.e2e_request_latency_ns
        assert request.preempted_in_prefill_ns <= (request.request_prefill_time_ns or 0)
        assert request.preempted_in_decode_ns <= (request.request_decode_time_ns or 0)
        assert (request.request_preempted_time_ns > 0) == (request.num_preemptions > 0)
        sequence = recording.run.sequences[request.seq_id]
        assert request.num_generation_tokens == sequence.num_completion_tokens
        assert request.finish_reason == sequence.finish_reason
        assert sum(request.inter_token_latencies_ns) == (
            request.token_ns[-1] - request.token_ns[0] if request.token_ns else 0
        )
    stats = recording.run.engine.prefix_cache_stats()
    assert (run.prefix_cache_queries, run.prefix_cache_hits) == (
        stats.num_query_tokens,
        stats.num_hit_tokens,
    )
    assert run.num_unfinished == 0
    assert run.num_finished + run.num_aborted == run.num_requests
    assert run.num_preemptions == sum(request.num_preemptions for request in requests)
    gaps = sum(len(request.inter_token_latencies_ns) for request in requests)
    assert (0 if run.inter_token_latency_ns is None else run.inter_token_latency_ns.count) == gaps


@given(workloads(), st.integers(1, 8), st.sampled_from(["scheduled", "ran", "sampled"]))
def test_everybody_is_measured_once_even_after_an_error(
    workload: Workload, step: int, at: str
) -> None:
    recording = Recording(workload, Interruption(step, at))
    requests, run = measure(recording.records)
    ended = [request.seq_id for request in requests]
    assert sorted(ended) == sorted(set(ended)) == sorted(recording.run.sequences)
    assert run.num_unfinished == 0
    for request in requests:
        assert phases_sum(request) == request.e2e_request_latency_ns


# -- the docs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [RequestMetrics, RunMetrics])
def test_every_metric_is_defined_on_the_docs_page(cls: type[RequestMetrics | RunMetrics]) -> None:
    page = (ROOT / "docs" / "en" / "metrics.md").read_text("utf-8")
    names = metric_names(cls)
    assert len(names) > 15
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_docs_page_defines_nothing_that_is_not_there() -> None:
    page = (ROOT / "docs" / "en" / "metrics.md").read_text("utf-8")
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| `")]
    known = {*metric_names(RequestMetrics), *metric_names(RunMetrics)}
    assert len(rows) > 30
    assert {row.strip("`") for row in rows} <= known


# -- the command -----------------------------------------------------------------------------------


pytestmark = pytest.mark.usefixtures("eighty_columns")


def test_json_is_one_object_per_request_and_the_run_last(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = folder / "crowded.jsonl"
    lines = [json.loads(line) for line in call(capsys, "stats", trace, "--json").out.splitlines()]
    assert [line["kind"] for line in lines] == ["request"] * 4 + ["run"]
    requests, run = measure(read_trace(trace))
    assert [line["seq_id"] for line in lines[:-1]] == [request.seq_id for request in requests]
    assert lines[0]["time_per_output_token_ns"] == requests[0].time_per_output_token_ns
    assert lines[-1]["num_preemptions"] == run.num_preemptions == 2
    assert set(lines[0]) == {"kind", *metric_names(RequestMetrics)}
    assert set(lines[-1]) == {"kind", *metric_names(RunMetrics)}


def test_plain_is_two_tables_with_tabs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "stats", folder / "crowded.jsonl", "--plain").out
    requests, run = (part.splitlines() for part in out.split("\n\n"))
    names = requests[0].split("\t")
    rows = [dict(zip(names, line.split("\t"), strict=True)) for line in requests[1:]]
    assert [row["num_preemptions"] for row in rows] == ["0", "0", "1", "1"]
    values = {line.split("\t")[0]: line.split("\t")[1:] for line in run}
    assert values["num_requests"] == ["4"]
    assert values["decode.num_steps"] == ["36"]
    assert values["e2e_request_latency_ns"][1] == "4"


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("name", ["article", "crowded", "chunked"])
def test_the_tables_stay_readable_at_80_columns(
    name: str, lang: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "stats", folder / f"{name}.jsonl", "--lang", lang)
    assert (outcome.code, outcome.err) == (0, "")
    assert max(map(cell_len, outcome.out.splitlines())) <= 80
    assert "…" not in outcome.out
    assert "TTFT" in outcome.out
    assert ("端到端" in outcome.out) == (lang == "zh")


def test_the_table_of_requests_says_how_many_it_leaves_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = call(capsys, "stats", folder / "crowded.jsonl", "--limit", "3").out
    assert out.rstrip().endswith("... and 1 more: --limit N, or --plain for all")


def test_a_cut_trace_is_measured_as_far_as_it_goes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = (folder / "crowded.jsonl").read_bytes()
    (tmp_path / "cut.jsonl").write_bytes(data[: len(data) // 2])
    outcome = call(capsys, "stats", tmp_path / "cut.jsonl", "--json")
    assert outcome.code == 0
    assert "is cut" in outcome.err
    assert json.loads(outcome.out.splitlines()[-1])["num_unfinished"] > 0


def test_stdin_and_compressed_traces_are_measured(folder: Path, tmp_path: Path) -> None:
    content = (folder / "chunked.jsonl").read_bytes()
    (tmp_path / "chunked.jsonl.gz").write_bytes(gzip.compress(content))
    from_file = spawn("stats", folder / "chunked.jsonl", "--plain")
    assert from_file.code == 0
    assert spawn("stats", "-", "--plain", stdin=content) == from_file
    assert spawn("stats", tmp_path / "chunked.jsonl.gz", "--plain") == from_file


def test_a_trace_is_measured_and_looked_into_without_torch_pandas_or_the_engine() -> None:
    code = (
        "import sys, nvtrace.measure, nvtrace.snapshots, nvtrace.query, nvtrace_cli.views.stats, "
        "nvtrace_cli.views.at; print(*sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "nvtrace" in loaded
    assert not loaded & {"torch", "transformers", "pandas", "numpy", "nanovllm"}


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_bar_is_drawn_on_a_terminal_only(
    folder: Path, *, is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_SMALL_BYTES", 0)
    monkeypatch.setattr(reading, "_STRIDE_BYTES", 1)
    monkeypatch.setattr(reading, "is_terminal", lambda *, stderr: stderr and is_watched)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr(reading, "make_console", lambda *, stderr: stderr and console)
    trace = folder / "article.jsonl"
    with reading.reading_bar(str(trace)) as watch:
        watch(trace.stat().st_size // 2)
    assert ("/" in screen.getvalue()) == is_watched


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["none.jsonl"], 3, "no such file"),
        ([".", "--json"], 3, "folder"),
        (["none.jsonl", "--json", "--plain"], 2, "give one"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "stats", *arguments)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (code, "", 1)
    assert said in outcome.err


def test_a_trace_that_cannot_be_true_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (folder / "article.jsonl").read_bytes().splitlines(keepends=True)
    torn = [line for line in lines if b'"REQUEST_ENQUEUE"' not in line]
    (tmp_path / "torn.jsonl").write_bytes(b"".join(torn))
    outcome = call(capsys, "stats", tmp_path / "torn.jsonl")
    assert outcome.code == 3
    assert "torn.jsonl: event" in outcome.err
