"""What if: the re-run of a recording, and what is said of its times."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from nanovllm.sampling_params import SamplingParams
from nvtrace import events as ev
from nvtrace.check import Checker
from nvtrace.diff import diff
from nvtrace.envelope import Footer, Header
from nvtrace.pipeline import Sink
from nvtrace.reader import read_trace
from nvtrace.recorder import Recorder
from nvtrace.replay import InconsistentTraceError, State
from nvtrace.steptime import OutOfRange, StepShape, StepTimes
from nvtrace.whatif import WhatIfError, parse_changes, read_recording, rerun, simulated_row
from support.cli import call, environment
from support.cli_traces import Ask, crowded_run, write_records, write_trace
from support.fake_runner import Settings, make_engine
from support.recording import BUSY, Recording
from support.workload import MemoryFile, workloads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nvtrace.envelope import Record
    from nvtrace.whatif import Arrivals
    from support.workload import Workload

Kind = TypeVar("Kind", bound=ev.Event)
MIXED = "policy=mixed,max_num_batched_tokens=8"  # of the crowded run: no step of it was mixed
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "max_num_batched_tokens": st.integers(1, 20).map(str),
        "max_num_seqs": st.integers(1, 6).map(str),
        "num_kvcache_blocks": st.integers(1, 30).map(str),
        "kvcache_block_size": st.integers(1, 6).map(str),
        "enable_prefix_caching": st.sampled_from(["true", "false"]),
        "policy": st.sampled_from(["prefill_first", "mixed", "static"]),
    },
)


def simulated(
    records: list[Record], changes: dict[str, str], arrivals: Arrivals = "step"
) -> list[Record]:
    """The trace of a re-run."""
    recording = read_recording(records)
    file = MemoryFile()
    changed = recording.settings.changed(changes)
    rerun(recording, changed, recording.step_times(), arrivals=arrivals, sink=Sink(file))
    return list(read_trace(io.BytesIO(file.contents), warn=pytest.fail))


def fold(records: list[Record]) -> State:
    """The state at a trace's end."""
    state = State()
    for record in records:
        state.apply(record)
    return state


def findings(records: list[Record]) -> list[object]:
    """What `nvtrace check` finds."""
    checker = Checker()
    return [finding for record in records for finding in checker.take(record)]


def events_of(records: Sequence[Record], kind: type[Kind]) -> list[Kind]:
    """Those of one kind."""
    return [record for record in records if isinstance(record, kind)]


# -- the schedule ----------------------------------------------------------------------------------


@given(workloads())
def test_unchanged_settings_take_exactly_the_recorded_decisions(workload: Workload) -> None:
    records = Recording(workload).records
    again = simulated(records, {})
    difference = diff(records, again)
    assert difference.decision is None
    assert not difference.tokens
    assert findings(again) == []
    recording = read_recording(records)
    outcome = rerun(recording, recording.settings, recording.step_times())
    assert outcome.first_other_step(recording) is None
    assert outcome.num_untimed == 0


@given(workloads(), CHANGES)
def test_under_any_settings_nobody_says_more_than_was_recorded(
    workload: Workload, changes: dict[str, str]
) -> None:
    records = Recording(workload).records
    again = simulated(records, changes)
    recorded, now = fold(records), fold(again)
    assert not now.waiting
    assert not now.running
    for seq_id, seq in now.sequences.items():
        told = recorded.sequences[seq_id]
        assert seq.token_ids == told.token_ids[: len(seq.token_ids)]
        if told.finish_reason != "aborted":
            assert (seq.finish_reason, seq.token_ids) == (told.finish_reason, told.token_ids)
    num_out = sum(len(events_of(each, ev.RequestRefused)) for each in (records, again))
    if not num_out:  # a request that is left out leaves a gap in the numbers, which check finds
        assert findings(again) == []


@settings(max_examples=60)
@given(workloads(), st.sampled_from(["step", "time"]))
def test_a_shorter_limit_ends_requests_there(workload: Workload, arrivals: Arrivals) -> None:
    records = Recording(workload).records
    limit = max(workload.settings.max_model_len // 2, 2)
    again = fold(simulated(records, {"max_model_len": str(limit)}, arrivals))
    assert all(len(seq.token_ids) <= limit for seq in again.sequences.values())


def test_a_trace_that_was_cut_off_is_run_to_where_it_ends() -> None:
    records = Recording(BUSY).records
    ends = [place for place, item in enumerate(records) if isinstance(item, ev.StepEnd)]
    cut = records[: ends[9] + 1]
    again = simulated(cut, {})
    steps = [len(events_of(each, ev.StepEnd)) for each in (cut, again)]
    assert steps == [10, 10]
    assert {event.seq_id for event in events_of(again, ev.RequestAbort)} >= {
        *fold(cut).running,
        *fold(cut).waiting,
    }
    difference = diff(cut, again)
    assert difference.decision is not None
    assert difference.decision.a.event is None, "they part where the recording is over"


def test_a_request_that_would_need_an_unrecorded_token_leaves_before() -> None:
    """It got 4 tokens by step 10, since a long prompt was computed meanwhile; then it was aborted.

    Under "mixed" nobody waits for a prompt: it has the 4 after step 4, and there is no fifth.
    """
    settings = Settings(kvcache_block_size=4, max_num_batched_tokens=8)
    records = recorded((settings, [Ask(4, 50, abort_before=10), Ask(40, 5, before_step=3)]))
    again = simulated(records, {"policy": "mixed"})
    for trace, last_step in ((records, 9), (again, 4)):
        (abort,) = events_of(trace, ev.RequestAbort)
        before = [step for step in events_of(trace, ev.StepEnd) if step.event_id < abort.event_id]
        assert (abort.num_completion_tokens, before[-1].step) == (4, last_step)
    assert findings(again) == []


def recorded(run: tuple[Settings, list[Ask]]) -> list[Record]:
    """The records of a run of `cli_traces`, in memory."""
    with TemporaryDirectory() as folder:
        return list(read_trace(write_trace(Path(folder) / "trace.jsonl", run)))


def test_more_blocks_spare_the_preemptions() -> None:
    records = recorded(crowded_run())
    assert events_of(records, ev.Preempt)
    assert not events_of(simulated(records, {"num_kvcache_blocks": "100"}), ev.Preempt)


def test_a_request_that_does_not_fit_any_more_is_refused_in_the_rerun() -> None:
    again = simulated(recorded(crowded_run()), {"num_kvcache_blocks": "2"})
    refused = events_of(again, ev.RequestRefused)
    assert [(event.reason, event.have) for event in refused] == [("never_fits", 2)] * 4


def test_a_refused_request_stays_so_unless_the_settings_change() -> None:
    records = Recording(BUSY).records
    recording, times = read_recording(records), read_recording(records).step_times()
    changed = recording.settings.changed({"num_kvcache_blocks": "100"})
    assert len(events_of(simulated(records, {}), ev.RequestRefused)) == 1
    assert rerun(recording, recording.settings, times).num_left_out == 0
    assert rerun(recording, changed, times).num_left_out == 1


def test_a_reset_of_the_prefix_cache_is_a_part_of_the_workload() -> None:
    file = MemoryFile()
    recorder = Recorder(Sink(file))
    engine = make_engine(Settings(kvcache_block_size=2), recorder)
    for _ in range(2):
        engine.add_request([1, 2, 1, 2, 1], SamplingParams(max_tokens=3, ignore_eos=True))
        while not engine.is_finished():
            engine.step()
        engine.reset_prefix_cache()
    recorder.close()
    records = list(read_trace(io.BytesIO(file.contents), warn=pytest.fail))
    again = simulated(records, {})
    assert len(events_of(again, ev.BlocksEvict)) == 2
    assert not events_of(again, ev.BlocksRevive)
    assert diff(records, again).decision is None


def test_by_time_a_request_comes_no_sooner_than_it_did() -> None:
    run = (Settings(kvcache_block_size=4), [Ask(5, 60), Ask(3, 9, before_step=30)])
    records = recorded(run)
    again = simulated(records, {"max_num_seqs": "1"}, arrivals="time")
    first, late = (event.ts_ns for event in events_of(records, ev.RequestEnqueue))
    first_again, late_again = (event.ts_ns for event in events_of(again, ev.RequestEnqueue))
    assert late_again - first_again >= late - first


def test_the_idle_time_before_a_late_request_passes_as_recorded() -> None:
    run = (Settings(), [Ask(5, 3), Ask(5, 3, before_step=4)])
    records = [item for item in recorded(run) if not isinstance(item, Footer)]
    second = events_of(records, ev.RequestEnqueue)[1]
    later = [
        structs.replace(item, ts_ns=item.ts_ns + 10**12)
        if isinstance(item, ev.Event) and item.event_id >= second.event_id
        else item
        for item in records
    ]
    recording = read_recording(later)
    outcome = rerun(recording, recording.settings, recording.step_times())
    assert outcome.metrics.duration_ns == pytest.approx(recording.metrics.duration_ns, rel=0.01)


def test_a_request_comes_within_the_pause_as_recorded_and_waits_no_longer() -> None:
    run = (Settings(), [Ask(5, 20), Ask(5, 3, before_step=4)])
    pauses = [
        structs.replace(item, ts_ns=item.ts_ns + (item.step or 0) * 10**9)
        if isinstance(item, ev.Event)
        else item
        for item in recorded(run)
    ]  # a second before each step; the request comes at the beginning of the fourth's
    late = events_of(pauses, ev.RequestEnqueue)[1]
    moved = [
        structs.replace(item, ts_ns=item.ts_ns + 39 * 10**8) if item is late else item
        for item in pauses
    ]
    recording = read_recording(moved)
    outcome = rerun(recording, recording.settings, recording.step_times())
    (again, first), (told, _) = (
        (spread.min, spread.max)
        for metrics in (outcome.metrics, recording.metrics)
        if (spread := metrics.time_to_first_token_ns) is not None
    )
    assert again == pytest.approx(told, rel=0.02)
    assert again < first


def test_a_changed_schedule_is_told_by_its_first_step() -> None:
    recording = read_recording(recorded(crowded_run()))
    changed = recording.settings.changed({"max_num_seqs": "1"})
    outcome = rerun(recording, changed, recording.step_times())
    assert outcome.first_other_step(recording) == 1


# -- what cannot be asked --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_num_sqs": "3"}, "'max_num_sqs' is not a scheduler setting: use max_num_batched_"),
        ({"max_num_seqs": "0"}, "max_num_seqs must be a whole number from 1 to"),
        ({"max_num_seqs": "many"}, "not 'many'"),
        ({"max_model_len": "1"}, "max_model_len must be a whole number from 2 to"),
        ({"num_kvcache_blocks": "99999999999999999999999"}, "num_kvcache_blocks must be a whole"),
        ({"enable_prefix_caching": "perhaps"}, "must be true or false, not 'perhaps'"),
        ({"policy": "fastest"}, "policy must be one of prefill_first, mixed, static"),
        ({"max_model_len": "100000000"}, "the model has 1000000 positions"),
    ],
)
def test_a_setting_that_is_none_is_refused_by_name(changes: dict[str, str], sentence: str) -> None:
    recording = read_recording(Recording(BUSY).records)
    with pytest.raises(WhatIfError, match=sentence):
        recording.check(recording.settings.changed(changes))


def test_what_lies_beyond_max_model_len_was_not_recorded() -> None:
    run = (Settings(max_model_len=20), [Ask(11, 24)])
    recording = read_recording(recorded(run))
    with pytest.raises(WhatIfError, match="1 answers ended at max_model_len=20"):
        recording.check(recording.settings.changed({"max_model_len": "21"}))
    recording.check(recording.settings.changed({"max_model_len": "19"}))


@pytest.mark.parametrize(
    ("assignments", "sentence"),
    [
        (["policy"], "'policy' is not a setting: write NAME=VALUE"),
        (["=3"], "'=3' is not a setting"),
        (["policy=mixed", "policy=static"], "policy is set twice in one case"),
    ],
)
def test_an_assignment_that_is_none_is_refused(assignments: list[str], sentence: str) -> None:
    with pytest.raises(WhatIfError, match=sentence):
        parse_changes(assignments)


def test_a_run_that_failed_is_not_run_again() -> None:
    records = Recording(BUSY).records
    last = records[-2]
    assert isinstance(last, ev.Event)
    reset = ev.EngineReset(
        event_id=last.event_id + 1,
        ts_ns=last.ts_ns,
        step=None,
        phase="postprocess",
        seq_ids=[],
        num_tokens=[],
    )
    with pytest.raises(WhatIfError, match="ENGINE_RESET"):
        read_recording([*records[:-1], reset])


def test_a_trace_without_an_engines_start_is_refused() -> None:
    with pytest.raises(WhatIfError, match="Give the trace of rank 0"):
        read_recording(Recording(BUSY).records[:1])


def test_an_answer_that_ends_for_no_reason_is_an_inconsistent_trace() -> None:
    records = [item for item in recorded(crowded_run()) if isinstance(item, Header | ev.Event)]
    last = max(place for place, item in enumerate(records) if isinstance(item, ev.SampleTokens))
    recording = read_recording(records[:last] + records[last + 1 :])
    with pytest.raises(
        InconsistentTraceError, match="no token or limit in the trace is the reason"
    ):
        rerun(recording, recording.settings, recording.step_times())


# -- step times ------------------------------------------------------------------------------------


def decode(num_seqs: int, context: int) -> StepShape:
    return StepShape("decode", num_seqs, context, num_seqs)


LINE = [(decode(n, c * n), 1000 + 50 * n + 3 * c * n) for n in (1, 2, 4) for c in range(10, 30)]


def test_a_line_is_found_again_though_tokens_are_sequences() -> None:
    times = StepTimes(LINE)
    fit = times.fits["decode"]
    assert times.predict(decode(3, 63)) == 1000 + 150 + 189
    assert fit.coefficients == pytest.approx((1000, 50, 3, 0), abs=1e-6)
    assert fit.median_error == pytest.approx(0, abs=1e-9)
    assert fit.r_squared == pytest.approx(1)


def test_the_error_is_that_of_steps_left_out() -> None:
    """Every fifth step takes twice as long: the rest cannot know it."""
    steps = [(decode(1, 10), 2000 if index % 5 == 0 else 1000) for index in range(50)]
    fit = StepTimes(steps).fits["decode"]
    assert fit.median_error == pytest.approx(0.25)  # of four folds: predicted 1250 for 1000
    assert fit.r_squared is not None
    assert fit.r_squared < 0


@pytest.mark.parametrize(("num_seqs", "is_known"), [(4, True), (5, False)])
def test_beyond_the_recorded_shapes_by_a_tenth_nothing_is_said(
    num_seqs: int, is_known: bool
) -> None:
    guess = StepTimes(LINE).predict(decode(num_seqs, 100))
    assert isinstance(guess, int) == is_known
    if not is_known:
        assert guess == OutOfRange("decode", "num_tokens", 5, 1, 4)


def test_a_context_up_to_a_tenth_longer_is_still_told() -> None:
    times, longest = StepTimes(LINE), 4 * 29
    assert isinstance(times.predict(decode(4, int(longest * 1.1))), int)
    assert times.predict(decode(4, int(longest * 1.1) + 1)) == OutOfRange(
        "decode", "num_context_tokens", 128, 10, 116
    )


def test_a_phase_that_was_never_recorded_has_no_time() -> None:
    assert StepTimes(LINE).predict(StepShape("mixed", 8, 8, 2)) == OutOfRange("mixed")


def test_a_few_steps_have_a_mean_and_no_error() -> None:
    times = StepTimes([(decode(1, 10), 900), (decode(2, 20), 1100)])
    fit = times.fits["decode"]
    assert times.predict(decode(2, 20)) == 1000
    assert (fit.median_error, fit.r_squared) == (None, None)


def test_no_step_is_taken_to_be_faster_than_the_fastest() -> None:
    steps = [(decode(n, 10 * n), 100 if n < 8 else 5000) for n in range(1, 10)] * 3
    assert StepTimes(steps).predict(decode(1, 10)) == 100


# -- what is said ----------------------------------------------------------------------------------


def test_times_that_nobody_knows_are_left_out_and_the_row_says_why() -> None:
    recording = read_recording(recorded(crowded_run()))
    changed = recording.settings.changed(parse_changes(MIXED.split(",")))
    row = simulated_row("mixed", rerun(recording, changed, recording.step_times()))
    assert row.num_mixed_steps
    assert OutOfRange("mixed") in row.beyond
    assert [row.duration_ns, row.ttft_p50_ns, row.ttft_p95_ns, row.output_throughput] == [None] * 4


def test_by_time_a_run_stops_where_the_time_is_not_known() -> None:
    recording = read_recording(recorded(crowded_run()))
    changed = recording.settings.changed(parse_changes(MIXED.split(",")))
    outcome = rerun(recording, changed, recording.step_times(), arrivals="time")
    row = simulated_row("mixed", outcome)
    assert outcome.is_stopped
    assert (row.num_steps, row.num_preemptions, row.duration_ns) == (None, None, None)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl", crowded_run())


def test_the_table_has_a_row_for_each_case_and_says_what_is_simulated(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = ("--set", "num_kvcache_blocks=19", "--case", MIXED)
    outcome = call(capsys, "whatif", trace, *cases, "--lang", "en")
    assert outcome.code == 0
    for words in (
        "case 1  num_kvcache_blocks=19",
        "case 2  policy=mixed, max_num_batched_tokens=8",
        "recorded     measured",
        "unchanged   simulated",
        "case 2      simulated       -",
        "decides as recorded in all",
        "no mixed step was recorded",
    ):
        assert words in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_json_has_an_object_for_each_fit_and_each_run(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "whatif", trace, "--case", MIXED, "--json")
    objects = [json.loads(line) for line in outcome.out.splitlines()]
    assert [each["kind"] for each in objects] == ["fit", "fit", "run", "run", "run"]
    assert [each["mode"] for each in objects[2:]] == ["measured", "simulated", "simulated"]
    assert [each["name"] for each in objects[2:]] == [
        "recorded",
        "unchanged",
        "policy=mixed, max_num_batched_tokens=8",
    ]
    assert objects[3]["first_other_step"] is None
    assert objects[3]["duration_ns"] == pytest.approx(objects[2]["duration_ns"], rel=0.05)
    assert objects[4]["duration_ns"] is None


def test_plain_is_two_tables_with_tabs(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = call(capsys, "whatif", trace, "--plain")
    runs, fits = (block.splitlines() for block in outcome.out.split("\n\n"))
    assert [line.split("\t")[0] for line in runs] == ["name", "recorded", "unchanged"]
    assert {len(line.split("\t")) for line in runs} == {17}
    assert [line.split("\t")[0] for line in fits] == ["phase", "prefill", "decode"]


def test_the_simulated_trace_is_one_that_every_command_reads(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "simulated.jsonl"
    arguments = ("whatif", trace, "--set", "num_kvcache_blocks=40", "--out", out)
    assert call(capsys, *arguments).code == 0
    header = next(iter(read_trace(out)))
    assert isinstance(header, Header)
    assert (header.mode, header.config["num_kvcache_blocks"]) == ("simulated", 40)
    for command in ("replay", "check", "stats"):
        assert call(capsys, command, out).code == 0
    again = call(capsys, *arguments)
    assert "already existed" in again.err


def test_a_trace_whose_times_nobody_knows_says_so(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "simulated.jsonl"
    outcome = call(capsys, "whatif", trace, "--case", MIXED, "--out", out)
    header = next(iter(read_trace(out)))
    assert isinstance(header, Header)
    assert header.clock["num_untimed_steps"] > 0
    assert "do not read times from it" in outcome.err


def test_a_trace_of_another_kind_of_engine_is_told_from_the_first_step_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its scheduler admitted one fewer than it could: whoever changes settings must know."""
    run = (replace(crowded_run()[0], max_num_seqs=1), crowded_run()[1])
    records = [
        structs.replace(item, max_num_seqs=2) if isinstance(item, ev.EngineInit) else item
        for item in read_trace(write_trace(tmp_path / "trace.jsonl", run))
        if isinstance(item, Header | Footer | ev.Event)
    ]
    path = write_records(tmp_path / "other.jsonl", records)
    outcome = call(capsys, "whatif", path, "--lang", "en")
    assert "decides differently from step 1 on" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--set", "policy=fastest"), "policy must be one of"),
        (("--set", "speed=9"), "'speed' is not a scheduler setting"),
        (("--json", "--plain"), "give one"),
        (
            ("--case", "policy=mixed", "--case", "policy=static", "--out", "x"),
            "--out keeps the trace of one run",
        ),
        (("--out", "no/such/folder/x.jsonl"), "cannot be written (No such file or directory)"),
    ],
)
def test_what_cannot_be_asked_is_wrong_usage(
    trace: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    outcome = call(capsys, "whatif", trace, *arguments)
    assert outcome.code == 2
    assert sentence in outcome.err
    assert outcome.out == ""


def test_a_simulation_that_fails_leaves_files_as_they_were(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "again.jsonl"
    out.write_text("older")

    def fail(*_arguments: object, **_options: object) -> None:
        assert out.read_text() == ""
        raise KeyboardInterrupt

    monkeypatch.setattr("nvtrace.whatif.rerun", fail)
    before = sorted(tmp_path.iterdir())
    assert call(capsys, "whatif", trace, "--out", out).code == 130
    assert out.read_text() == "older"
    assert sorted(tmp_path.iterdir()) == before


def test_a_simulated_trace_that_is_moved_or_removed_is_told_so(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, new = tmp_path / "again.jsonl", tmp_path / "folder" / "moved.jsonl"
    new.parent.mkdir()
    close = Sink.close
    for take_away, code, said in (
        (lambda: out.rename(new), 0, f"simulated trace: {new}"),
        (out.unlink, 5, f"{out} was removed while it was written: there is no trace"),
    ):

        def close_late(sink: Sink, take_away: Callable[[], object] = take_away) -> None:
            if sink.made is not None:  # the one that is kept
                take_away()
            close(sink)

        with monkeypatch.context() as patch:
            patch.setattr(Sink, "close", close_late)
            outcome = call(capsys, "whatif", trace, "--out", out)
        assert (outcome.code, said in outcome.err) == (code, True), outcome.err


def test_whatif_loads_no_torch_and_no_pandas(trace: Path) -> None:
    code = (
        "import sys; from nvtrace_cli.main import run_command; "
        f"code = run_command(['whatif', {str(trace)!r}, '--set', 'policy=mixed']); "
        "heavy = {'torch', 'transformers', 'pandas', 'numpy'} & {*sys.modules}; "
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_it_is_said_why_requests_were_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = write_trace(tmp_path / "trace.jsonl", crowded_run()), tmp_path / "out.jsonl"
    done = call(capsys, "whatif", trace, "--set", "num_kvcache_blocks=8", "--out", out)
    told = " ".join(done.out.split())
    assert "case 1: 4 requests were refused: 4 may grow to 9 blocks, and the pool has 8." in told
    short = " ".join(call(capsys, "whatif", trace, "--set", "max_model_len=11").out.split())
    assert "4 need 12 tokens (the prompt and one more), and max_model_len is 11" in short
    told = call(capsys, "whatif", trace, "--set", "num_kvcache_blocks=8", "--json").out
    case = json.loads(told.splitlines()[-1])
    assert case["refusals"] == [
        {"reason": "never_fits", "count": 4, "least_need": 9, "most_need": 9, "have": 8}
    ]
    replayed = " ".join(call(capsys, "replay", out).out.split())
    assert "4 requests that could never finish: 4 may grow to 9 blocks" in replayed


def test_a_policy_that_is_not_here_is_compared_with_those_that_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [*read_trace(write_trace(tmp_path / "trace.jsonl", crowded_run()))]
    foreign = [
        msgspec.structs.replace(record, policy="mine")
        if isinstance(record, ev.EngineInit)
        else record
        for record in records
        if isinstance(record, Header | Footer | ev.Event)
    ]
    trace, out = write_records(tmp_path / "mine.jsonl", foreign), tmp_path / "out.jsonl"
    done = call(capsys, "whatif", trace, "--set", "policy=mixed", "--out", out)
    assert done.code == 0
    assert "The recorded policy, mine, is not installed here" in done.out
    rows = [json.loads(line) for line in call(capsys, "whatif", trace, "--json").out.splitlines()]
    assert [row["num_steps"] is None for row in rows if row["kind"] == "run"] == [False, True]
    refused = call(capsys, "whatif", trace, "--out", out)
    assert (refused.code, "not 'mine'" in refused.err) == (2, True)
