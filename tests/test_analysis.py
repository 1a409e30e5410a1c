"""nvtrace.load: what its frames hold, beside the trace, the fold, the metrics and pandas itself."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nvtrace
from nvtrace import events as ev
from nvtrace.analysis import (
    batch_occupancy,
    graph_padding,
    kv_use,
    latency_breakdown,
    preemption_cost,
    reading,
    request_spans,
    static_waste,
    step_time_by_class,
    waiting_by_reason,
)
from nvtrace.analysis.columns import FRAMES
from nvtrace.analysis.frames import FrameError
from nvtrace.measure import Measure
from nvtrace.metrics import RequestMetrics, metric_names
from nvtrace.reader import UnreadableTraceError, read_trace
from nvtrace.replay import fold_steps
from nvtrace.snapshots import NoSuchStepError
from support.every import every
from support.examples import changed, example_of, example_trace, line_of
from support.recording import BUSY, BUSY_MIXED, Interruption, Recording
from support.workload import Workload, workloads

if TYPE_CHECKING:
    from collections.abc import Callable

TRACES = ("article.jsonl", "crowded.jsonl", "chunked.jsonl")
HEADER = example_trace()[0]
RECORDED = Path(__file__).parents[1] / "docs" / "traces"
TWO_RANKS = RECORDED / "two-ranks.jsonl.zst"


def write(path: Path, *lines: bytes) -> Path:
    """A trace of these lines."""
    path.write_bytes(b"".join(lines))
    return path


def loaded(data: bytes) -> nvtrace.Trace:
    """A trace that lies in memory."""
    with tempfile.TemporaryDirectory() as folder:
        trace = nvtrace.load(write(Path(folder) / "trace.jsonl", data))
        _ = trace.requests  # reads the file once more
        return trace


# -- columns ---------------------------------------------------------------------------------------


@every("name", FRAMES)
@pytest.mark.parametrize("trace", [*TRACES, "only a header"])
def test_a_frame_has_exactly_the_documented_columns(
    folder: Path, tmp_path: Path, trace: str, name: str
) -> None:
    path = write(tmp_path / "t.jsonl", HEADER) if trace == "only a header" else folder / trace
    frame = getattr(nvtrace.load(path), name)
    documented = {column.name: column.dtype for column in FRAMES[name].columns}
    assert {column: str(dtype) for column, dtype in frame.dtypes.items()} == documented
    assert list(frame.columns) == list(documented)
    assert len(frame) > 0 or trace == "only a header"
    assert list(frame.index) == list(range(len(frame)))


def test_columns_of_one_name_have_one_meaning_in_all_frames() -> None:
    dtypes: dict[str, set[str]] = {}
    for frame in FRAMES.values():
        for column in frame.columns:
            dtypes.setdefault(column.name, set()).add(column.dtype.lower())
            assert column.meaning
            assert column.unit == ("ns" if column.name.endswith("_ns") else column.unit)
    assert all(len(kinds) == 1 for kinds in dtypes.values())


def test_requests_have_all_metrics_that_are_one_value() -> None:
    names = set(metric_names(RequestMetrics)) - {"inter_token_latencies_ns"}
    assert set(FRAMES["requests"].names) == names


def test_frames_join_on_step_and_seq_id(folder: Path) -> None:
    trace = nvtrace.load(folder / "crowded.jsonl")
    tokens = trace.tokens.merge(trace.steps, on="step", suffixes=("", "_of_step"))
    assert len(tokens) == len(trace.tokens)
    assert (tokens["ts_ns"] == tokens["ts_ns_of_step"]).all()
    counts = trace.requests.set_index("seq_id")["num_generation_tokens"]
    assert (trace.tokens.groupby("seq_id").size() == counts.sort_index()).all()
    assert set(trace.blocks["seq_id"].dropna()) == set(trace.requests["seq_id"])


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TRACES, "every event"])
def test_tables_hold_what_pandas_reads(folder: Path, tmp_path: Path, name: str) -> None:
    path = folder / name
    if name == "every event":
        path = write(tmp_path / "trace.jsonl", *example_trace())
    wide = pd.read_json(path, lines=True, dtype=False, precise_float=True)
    trace = nvtrace.load(path)
    num_compared = 0
    for kind in ev.EVENT_TYPES:
        table, rows = trace.table(kind), wide[wide["event"] == kind]
        assert len(table) == len(rows)
        for field in table.columns.drop("rank"):
            if len(table):
                assert plain(table[field]) == plain(rows[field]), f"{kind}.{field}"
                num_compared += 1
    assert num_compared > 50
    events = wide[wide["event"].isin(list(ev.EVENT_TYPES))]
    for field in ("event", "event_id", "ts_ns", "step", "phase", "reason"):
        assert plain(trace.events[field]) == plain(events[field])


def plain(column: pd.Series) -> list[object]:
    """A column's values as JSON has them; what is missing as None."""
    values = column.astype(object).tolist()
    there = [
        value if isinstance(value, list | tuple) or pd.notna(value) else None for value in values
    ]
    return [json.loads(json.dumps(value)) for value in there]


def test_numbers_of_64_bits_are_kept(tmp_path: Path) -> None:
    arrival = example_of(ev.RequestEnqueue)
    line = changed(line_of(arrival), seed=2**64 - 1, ts_ns=2**63 - 1, top_k=None)
    table = nvtrace.load(write(tmp_path / "t.jsonl", HEADER, line)).table("REQUEST_ENQUEUE")
    assert table["seed"].tolist() == [2**64 - 1]
    assert table["ts_ns"].tolist() == [2**63 - 1]
    assert table["top_k"].isna().all()


@pytest.mark.parametrize(("field", "number"), [("ts_ns", 2**63), ("step", 2**63), ("seed", -1)])
def test_a_number_that_its_column_cannot_hold_is_an_error_that_names_it(
    tmp_path: Path, field: str, number: int
) -> None:
    line = changed(line_of(example_of(ev.RequestEnqueue)), **{field: number})
    with pytest.raises(FrameError, match=f"REQUEST_ENQUEUE.{field} holds a number beyond 64 bits"):
        nvtrace.load(write(tmp_path / "t.jsonl", HEADER, line))


def test_an_unknown_kind_of_event_is_an_error_that_names_the_known_ones(folder: Path) -> None:
    with pytest.raises(
        KeyError, match="'STEP_STOP' is not a kind of event: these are ENGINE_INIT, "
    ):
        nvtrace.load(folder / "article.jsonl").table("STEP_STOP")


def test_steps_say_what_their_events_say(folder: Path) -> None:
    steps = nvtrace.load(folder / "chunked.jsonl").steps.set_index("step")
    numbers = []
    for step in fold_steps(read_trace(folder / "chunked.jsonl")):
        if not step.index:
            continue
        numbers.append(step.index)
        row, schedule, end = steps.loc[step.index], step.schedule, step.end
        assert schedule is not None
        assert end is not None
        assert (row["event_id"], row["phase"]) == (schedule.event_id, end.batch_phase)
        assert (row["num_waiting"], row["num_running"], row["num_free_blocks"]) == (
            schedule.waiting_len,
            schedule.running_len,
            schedule.free_blocks,
        )
        assert (row["num_seqs"], row["num_batched_tokens"]) == (
            end.num_seqs,
            end.num_batched_tokens,
        )
        assert row["num_prefill_tokens"] + row["num_decode_tokens"] == end.num_batched_tokens
        assert (row["ts_ns"], row["start_ns"]) == (end.ts_ns, end.ts_ns - end.wall_ns)
        assert row["num_finished"] == len(end.finished)
        lens = [len(step.state.sequences[seq_id].token_ids) for seq_id in schedule.seq_ids]
        if end.batch_phase == "decode":
            assert row["num_context_tokens"] == sum(lens) - len(lens)  # the new ones come after
    assert numbers == list(steps.index)


def test_mixed_steps_count_prompts_and_decodes_apart() -> None:
    steps = loaded(Recording(BUSY_MIXED).data).steps
    mixed = steps[steps["phase"] == "mixed"]
    assert len(mixed)
    assert (mixed["num_prefill_tokens"] > 0).all()
    assert (mixed["num_decode_tokens"] > 0).all()
    total = mixed["num_prefill_tokens"] + mixed["num_decode_tokens"]
    assert (total == mixed["num_batched_tokens"]).all()


def test_a_graphs_padding_and_its_launch_ahead_are_in_steps(tmp_path: Path) -> None:
    lines = [HEADER]
    for step, is_ahead in ((1, False), (2, True)):
        schedule = line_of(example_of(ev.ScheduleDecode, 3 * step))
        lines.append(changed(schedule, step=step, scheduled=3))
        replay = line_of(example_of(ev.CudagraphReplay, 3 * step + 1))
        lines.append(changed(replay, step=step, graph_batch_size=4, padding=1, is_ahead=is_ahead))
    steps = nvtrace.load(write(tmp_path / "t.jsonl", *lines)).steps
    assert steps["graph_batch_size"].tolist() == [4, 4]
    assert steps["num_padding_rows"].tolist() == [1, 1]
    assert steps["is_ahead"].tolist() == [False, True]
    assert steps["eager_reason"].isna().all()
    assert steps["wall_ns"].isna().all()  # they broke off


INTERRUPTIONS = st.none() | st.builds(
    Interruption, step=st.integers(1, 9), at=st.sampled_from(["ran", "sampled", "schedule_decode"])
)


@settings(max_examples=30)  # each a run, its trace, and all its frames after each step
@given(workloads(), INTERRUPTIONS)
@example(BUSY, None)
@example(BUSY, Interruption(3, "sampled"))
def test_frames_agree_with_the_fold_and_the_metrics(
    workload: Workload, interruption: Interruption | None
) -> None:
    recording = Recording(workload, interruption)
    trace = loaded(recording.data)
    assert_blocks_agree(trace, recording)
    assert_requests_agree(trace, recording)


def assert_blocks_agree(trace: nvtrace.Trace, recording: Recording) -> None:
    """After each step the last operation on each page leaves it as the fold has it."""
    names = ["event_id", "block_id", "ref_count", "is_hashed"]
    rows = iter([*trace.blocks[names].itertuples(index=False), (2**63, 0, 0, False)])
    ref_counts: dict[int, int] = {}
    hashed: dict[int, bool] = {}
    event_id, *page = next(rows)
    for step in fold_steps(recording.records):
        while event_id <= (step.events or step.before)[-1].event_id:
            ref_counts[page[0]], hashed[page[0]] = page[1:]
            event_id, *page = next(rows)
        held = {block_id: count for block_id, count in ref_counts.items() if count}
        assert held == {i: count for i, count in enumerate(step.state.ref_counts) if count}
        assert {block_id for block_id, is_so in hashed.items() if is_so} == set(
            step.state.block_hashes
        )
    use = kv_use(trace.steps, trace.blocks, workload_blocks(recording))
    assert use["num_free_blocks"].tolist() == trace.steps["num_free_blocks"].tolist()


def workload_blocks(recording: Recording) -> int:
    """Pages in the pool."""
    return recording.run.workload.settings.num_kvcache_blocks


def assert_requests_agree(trace: nvtrace.Trace, recording: Recording) -> None:
    """Requests are the metrics', tokens are theirs, and their spans are whole."""
    measure = Measure()
    ended = [request for record in recording.records for request in measure.apply(record)]
    assert trace.requests["seq_id"].tolist() == [request.seq_id for request in ended]
    for request in ended:
        tokens = trace.tokens[trace.tokens["seq_id"] == request.seq_id]
        assert tokens["ts_ns"].tolist() == list(request.token_ns)
        assert tokens["index"].tolist() == list(range(len(tokens)))
        assert tokens["itl_ns"].dropna().tolist() == list(request.inter_token_latencies_ns)
        told = recording.run.sequences[request.seq_id].token_ids[request.num_prompt_tokens :]
        assert tokens["token_id"].tolist() == told[: len(tokens)]
    spans = request_spans(trace.requests, trace.table("STATE_TRANSITION"))
    sums = spans.assign(ns=spans["end_ns"] - spans["start_ns"])
    sums = sums.pivot_table(index="seq_id", columns="span", values="ns", aggfunc="sum")
    breakdown = latency_breakdown(trace.requests).set_index("seq_id")
    for seq_id, row in breakdown.iterrows():
        parts = {name: row[f"{name}_ns"] for name in ("queue", "prefill", "decode", "preempted")}
        expected = {name: ns for name, ns in parts.items() if pd.notna(ns) and ns > 0}
        mine = sums.loc[seq_id] if seq_id in sums.index else pd.Series(dtype="int64")
        assert {name: ns for name, ns in mine.items() if ns > 0} == expected
        assert sum(expected.values()) == row["e2e_request_latency_ns"]


# -- the trace -------------------------------------------------------------------------------------


def test_the_state_at_a_step_is_the_folds(folder: Path) -> None:
    trace = nvtrace.load(folder / "crowded.jsonl")
    steps = fold_steps(read_trace(folder / "crowded.jsonl"))
    wanted = next(step for step in steps if step.index == 9)
    state = trace.at(9)
    assert (state.waiting, state.running) == (wanted.state.waiting, wanted.state.running)
    assert state.ref_counts == wanted.state.ref_counts
    assert trace.at(9, "schedule").engine_step == 9
    assert trace.at().engine_step == trace.steps["step"].max()
    with pytest.raises(NoSuchStepError, match="has no step 999"):
        trace.at(999)


def test_a_frame_is_made_once(folder: Path) -> None:
    trace = nvtrace.load(folder / "article.jsonl")
    assert trace.steps is trace.steps
    assert trace.table("STEP_END") is trace.table("STEP_END")


def test_header_and_footer_are_there_and_a_cut_is_told(folder: Path, tmp_path: Path) -> None:
    trace = nvtrace.load(folder / "article.jsonl")
    assert trace.header.model["num_hidden_layers"] == 28
    assert trace.footer is not None
    assert trace.footer.exit == "ok"
    assert trace.warnings == ()
    cut = (folder / "article.jsonl").read_bytes()[:-100]
    trace = nvtrace.load(write(tmp_path / "cut.jsonl", cut))
    assert trace.footer is None
    assert "is cut" in trace.warnings[0]


def test_events_of_a_newer_version_are_counted_and_left_out(tmp_path: Path) -> None:
    moon = changed(line_of(example_of(ev.StepEnd)), event="MOON")
    trace = nvtrace.load(write(tmp_path / "t.jsonl", HEADER, moon, *example_trace()[1:]))
    assert "MOON x 1" in trace.warnings[0]
    assert len(trace.events) == len(ev.EVENT_TYPES)


def test_a_broken_trace_is_an_error_as_everywhere(tmp_path: Path) -> None:
    with pytest.raises(UnreadableTraceError, match="no such file"):
        nvtrace.load(tmp_path / "none.jsonl")
    with pytest.raises(UnreadableTraceError, match="line 2 is not a record"):
        nvtrace.load(write(tmp_path / "broken.jsonl", HEADER, b"oops\n"))


def test_loading_says_what_it_is(folder: Path) -> None:
    assert repr(nvtrace.load(folder / "article.jsonl")).endswith("events of rank 0>")


@pytest.mark.parametrize(
    ("statement", "is_loaded"),
    [
        ("import nvtrace.analysis, nvtrace.analysis.columns, nvtrace.reference", False),
        ("from nvtrace import read_trace", False),
        ("from nvtrace import load", True),
    ],
)
def test_pandas_is_loaded_by_whoever_asks_for_frames(statement: str, *, is_loaded: bool) -> None:
    code = f"import sys; {statement}; print('pandas' in sys.modules, 'matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(is_loaded), "False"]


# -- ranks -----------------------------------------------------------------------------------------


def two_ranks(folder: Path) -> Path:
    """A step on two ranks: rank 0 decides and ends it, both run it."""
    headers = [changed(HEADER, rank=rank, world_size=2) for rank in (0, 1)]
    zero = [
        changed(line_of(example_of(ev.ScheduleDecode, 1)), step=1, scheduled=2, seq_ids=[4, 5]),
        changed(
            line_of(example_of(ev.PrepareDecodeTensors, 2)),
            step=1,
            batch_size=2,
            context_lens=[7, 9],
        ),
        changed(line_of(example_of(ev.CudagraphReplay, 3)), step=1, graph_batch_size=2),
        changed(line_of(example_of(ev.StepEnd, 4)), step=1, wall_ns=50, ts_ns=90),
    ]
    write(folder / "t.rank1.jsonl", headers[1], *zero[1:3])
    return write(folder / "t.jsonl", headers[0], *zero)


def test_ranks_that_lie_beside_are_read_with_it(tmp_path: Path) -> None:
    trace = nvtrace.load(two_ranks(tmp_path))
    assert trace.events["rank"].tolist() == [0] * 4 + [1] * 2
    assert list(trace.headers) == [0, 1]
    steps = trace.steps
    assert steps[["rank", "step"]].to_numpy().tolist() == [[0, 1]]
    assert steps[["num_seqs", "num_context_tokens", "start_ns"]].to_numpy().tolist() == [
        [2, 16, 40]
    ]
    assert trace.table("CUDAGRAPH_REPLAY")["rank"].tolist() == [0, 1]


def test_a_join_with_several_ranks_doubles_nothing() -> None:
    alone, both = (nvtrace.load(TWO_RANKS, rank=rank) for rank in (0, None))
    assert list(both.headers) == [0, 1]
    assert both.steps.equals(alone.steps)
    joined = both.tokens.merge(both.steps, on="step")
    assert len(joined) == len(both.tokens)
    per_token = joined.groupby("step")["num_seqs"].first()
    assert per_token.sum() == both.steps["num_seqs"].sum()
    for name in ("requests", "tokens", "blocks"):
        assert getattr(both, name).equals(getattr(alone, name))
    runs = both.table("RUN_EAGER")
    assert len(runs.merge(both.steps, on=["rank", "step"])) == len(both.steps) == len(runs) // 2


def test_the_docs_join_of_replays_gives_the_first_ranks() -> None:
    pair = nvtrace.load(RECORDED / "gpu-two-gpus.jsonl.zst")
    replays = pair.table("CUDAGRAPH_REPLAY")
    joined = replays.merge(pair.steps, on=["rank", "step"])
    assert (len(replays), len(joined), {*joined["rank"]}) == (510, 255, {0})


@pytest.mark.parametrize(
    ("analysis", "frames"),
    [
        (batch_occupancy, ["steps"]),
        (static_waste, ["steps"]),
        (graph_padding, ["steps"]),
        (step_time_by_class, ["steps"]),
        (waiting_by_reason, ["ADMISSION_STOP", "steps"]),
        (request_spans, ["requests", "STATE_TRANSITION"]),
        (preemption_cost, ["requests", "PREEMPT"]),
    ],
)
def test_an_analysis_of_several_ranks_is_that_of_the_first(
    analysis: Callable[..., pd.DataFrame], frames: list[str]
) -> None:
    results = []
    for rank in (0, None):
        trace = nvtrace.load(TWO_RANKS, rank=rank)
        taken = [trace.table(n) if n.isupper() else getattr(trace, n) for n in frames]
        results.append(analysis(*taken))
    pd.testing.assert_frame_equal(*results)


@pytest.mark.parametrize("name", ["example", "two-ranks", "gpu-preemption"])
def test_what_is_missing_is_missing_in_one_way_in_each_kind_of_column(name: str) -> None:
    trace = nvtrace.load(RECORDED / f"{name}.jsonl.zst")
    kinds = [trace.table(kind) for kind in ev.EVENT_TYPES]
    for frame in (trace.events, trace.steps, trace.requests, trace.tokens, trace.blocks, *kinds):
        for column, dtype in frame.dtypes.items():
            missing = list(frame[column][frame[column].isna()])
            is_nullable = str(dtype)[0].isupper() or str(dtype) == "boolean"
            assert all((value is pd.NA) == is_nullable for value in missing), column
            assert all(value is not None for value in missing), column


def test_a_notebook_shows_a_trace_and_a_state_as_tables() -> None:
    trace = nvtrace.load(TWO_RANKS)
    shown = trace._repr_html_()
    assert shown.startswith("<table><caption>Trace ")
    assert shown.count("<tr>") == 3
    assert shown.count("<td>ok</td>") == 2
    state = trace.at(2)
    assert state._repr_html_().count("<tr>") == 1 + len(state.running) + len(state.waiting)
    assert repr(state)[1:-1] in state._repr_html_()
    trace.path = Path("<b>.jsonl")
    assert "Trace &lt;b&gt;.jsonl" in trace._repr_html_()


def test_one_rank_can_be_read_alone(tmp_path: Path) -> None:
    path = two_ranks(tmp_path)
    assert nvtrace.load(path, rank=0).events["rank"].unique().tolist() == [0]
    trace = nvtrace.load(path, rank=1)
    assert trace.events["rank"].tolist() == [1, 1]
    assert trace.header.rank == 1
    assert trace.steps["num_seqs"].tolist() == [2]
    assert trace.requests.empty


def test_a_missing_rank_is_told(tmp_path: Path) -> None:
    path = two_ranks(tmp_path)
    (tmp_path / "t.rank1.jsonl").unlink()
    trace = nvtrace.load(path)
    assert any("one is left out" in warning for warning in trace.warnings)


# -- the comparison with pandas --------------------------------------------------------------------


def test_the_comparison_runs_and_says_what_it_compares(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reading.main([str(folder / "article.jsonl"), "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    for what in ("read_blocks", "load, .events", "and every table", "pandas.read_json"):
        assert what in out
    num_events = len(nvtrace.load(folder / "article.jsonl").events)
    assert f"{num_events:,} events" in out


@pytest.mark.parametrize("arguments", [[], ["no/such/file"], ["x", "--rounds", "none"]])
def test_the_comparison_refuses_what_it_cannot_read(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as told:
        reading.main(arguments)
    assert told.value.code == 2
    assert "usage" in capsys.readouterr().err
