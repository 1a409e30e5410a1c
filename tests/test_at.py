"""nvtrace at: the state at any moment is the engine's own, and conditions stop where they hold."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from nvtrace import events as ev
from nvtrace.at import StepPoint, inputs_at, matches, moments
from nvtrace.envelope import Footer, Header
from nvtrace.nvindex import read_index
from nvtrace.query import STATE_FIELDS, QueryError, parse
from nvtrace.reader import UnreadableTraceError, read_trace
from nvtrace.replay import State
from nvtrace.snapshots import NoSuchStepError, SeekableTrace, load_state, save_state
from support.cli import ROOT, call, spawn
from support.cli_traces import chunked_run, write_records, write_trace
from support.recording import BUSY, BUSY_MIXED, Interruption, Recording
from support.snapshot import snapshot_of_fold
from support.workload import Workload, workloads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvtrace.at import Moment, Point
    from support.snapshot import Snapshot

POINTS: tuple[Point, Point] = ("schedule", "end")


@contextlib.contextmanager
def film_of(data: bytes, spacing_bytes: int) -> Iterator[SeekableTrace]:
    """A trace in a file of its own, with snapshots as close as that."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_bytes(data)
        yield SeekableTrace(path, warn=pytest.fail, spacing_bytes=spacing_bytes)


def engines_word(recording: Recording) -> dict[StepPoint, Snapshot]:
    """What the engine itself was, at each moment of each step."""
    names: dict[str, Point] = {"schedule": "schedule", "postprocess": "end", "reset": "end"}
    words: dict[StepPoint, Snapshot] = {}
    step = 0
    for point, snapshot in recording.points:
        step += point == "schedule"
        words[StepPoint(step, names[point])] = snapshot
    return words


def assert_same_state(moment: Moment, engine: Snapshot) -> None:
    """All is equal but the requests that ended in steps before: a moment leaves them out."""
    seen = snapshot_of_fold(moment.state)
    for name in ("waiting", "running", "ref_counts", "free_blocks", "block_hashes"):
        assert getattr(seen, name) == getattr(engine, name), name
    assert seen.cached_blocks == engine.cached_blocks
    left_out = engine.sequences.keys() - seen.sequences.keys()
    assert {engine.sequences[seq_id].status for seq_id in left_out} <= {"FINISHED"}
    assert seen.sequences == {s: engine.sequences[s] for s in seen.sequences}


# -- the state -------------------------------------------------------------------------------------


@given(workloads(), st.data(), st.sampled_from([1, 700, 3000, 10**9]))
def test_the_state_at_any_moment_of_any_step_is_the_engines(
    workload: Workload, data: st.DataObject, spacing_bytes: int
) -> None:
    recording = Recording(workload)
    words = engines_word(recording)
    with film_of(recording.data, spacing_bytes) as film:
        for _ in range(min(len(words), 4)):
            place = data.draw(st.sampled_from(list(words)))
            moment = film.at(place.step, place.point)
            assert (moment.step, moment.point) == (place.step, place.point)
            assert_same_state(moment, words[place])


@pytest.mark.parametrize("workload", [BUSY, BUSY_MIXED])
@pytest.mark.parametrize("spacing_bytes", [1, 10**9])
def test_every_moment_of_a_busy_run_is_the_engines(workload: Workload, spacing_bytes: int) -> None:
    recording = Recording(workload)
    words = engines_word(recording)
    assert len(words) > 20
    with film_of(recording.data, spacing_bytes) as film:
        for place, engine in words.items():
            assert_same_state(film.at(place.step, place.point), engine)


@given(workloads(), st.integers(1, 8), st.sampled_from(["scheduled", "ran", "sampled"]))
def test_the_state_after_a_step_that_broke_off_is_the_engines(
    workload: Workload, step: int, at: str
) -> None:
    recording = Recording(workload, Interruption(step, at))
    words = engines_word(recording)
    with film_of(recording.data, 1) as film:
        for place, engine in words.items():
            assert_same_state(film.at(place.step, place.point), engine)


def test_a_request_that_ended_in_the_step_is_still_told_of_at_its_end() -> None:
    recording = Recording(BUSY)
    for moment in moments(recording.records):
        ended = [
            event.seq_id
            for event in moment.news
            if isinstance(event, ev.StateTransition) and event.status == "FINISHED"
        ]
        for seq_id in ended:
            assert moment.state.sequences[seq_id].status == "FINISHED"


def test_no_news_is_lost_and_none_is_told_twice() -> None:
    recording = Recording(BUSY, Interruption(3, "ran"))
    told = [event for moment in moments(recording.records) for event in moment.news]
    assert told == [record for record in recording.records if isinstance(record, ev.Event)]


def test_a_saved_state_comes_back_as_it_was() -> None:
    state = State()
    for moment in moments(Recording(BUSY).records, state):
        if moment.point == "end":
            back = snapshot_of_fold(load_state(save_state(state)))
            seen = snapshot_of_fold(state)
            living = {s for s, seq in seen.sequences.items() if seq.status != "FINISHED"}
            assert back.sequences == {s: seen.sequences[s] for s in living}
            assert back.free_blocks == seen.free_blocks
            assert (back.ref_counts, back.block_hashes) == (seen.ref_counts, seen.block_hashes)


def test_a_step_that_is_not_there_is_named_with_those_that_are() -> None:
    recording = Recording(BUSY)
    last = recording.run.num_steps
    for spacing_bytes in (1, 10**9):
        with film_of(recording.data, spacing_bytes) as film:
            with pytest.raises(NoSuchStepError, match=rf"no step 999: it has steps 1 to {last}$"):
                film.at(999, "end")
            assert film.at(None, "end").step == last


def test_a_trace_without_steps_has_none() -> None:
    records = Recording(BUSY).data.splitlines(keepends=True)
    data = b"".join(line for line in records if b'"step":null' in line or b"TRACE_HEADER" in line)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_bytes(data.split(b'{"event":"REQUEST_OUTPUT"')[0].split(b'{"event":"REQ')[0])
        with pytest.raises(NoSuchStepError, match="has no steps"):
            SeekableTrace(path).at(None, "end")
        with pytest.raises(NoSuchStepError, match="no step 1: it has none"):
            SeekableTrace(path).at(1, "end")


# -- the inputs ------------------------------------------------------------------------------------


@given(workloads())
@example(BUSY_MIXED)
def test_the_inputs_worked_out_of_the_state_are_those_the_engine_prepared(
    workload: Workload,
) -> None:
    inputs = None
    for moment in moments(Recording(workload).records):
        if moment.point == "schedule" and moment.schedule is not None:
            inputs = inputs_at(moment.state, moment.schedule)
            continue
        for event in moment.news:
            if isinstance(event, ev.PreparePrefillTensors):
                assert inputs is not None
                runs = [(run.first_slot, run.last_slot) for run in inputs.runs]
                assert runs == event.slot_ranges
                assert list(inputs.cu_seqlens_q) == event.cu_seqlens_q
                assert list(inputs.cu_seqlens_k) == event.cu_seqlens_k
                assert inputs.num_tokens == event.flat_tokens
            elif isinstance(event, ev.PrepareDecodeTensors):
                assert inputs is not None
                assert [run.first_slot for run in inputs.runs] == event.slot_mapping
                assert list(inputs.context_lens) == event.context_lens


@pytest.mark.parametrize("policy", ["prefill_first", "mixed", "static"])
def test_what_a_sound_engine_says_follows(policy: str) -> None:
    workload = replace(BUSY, settings=replace(BUSY.settings, policy=policy))
    records, fields = Recording(workload).records, set[tuple[str, str]]()
    for step in range(1, max(r.step or 0 for r in records if isinstance(r, ev.Event)) + 1):
        for moment in moments(records, inputs_of=step):
            assert (moment.step == step) == bool(moment.claims)
            assert [claim for claim in moment.claims if not claim.holds] == []
            fields |= {(claim.event, claim.field) for claim in moment.claims}
    assert {("PREPARE_DECODE_TENSORS", "slot_mapping"), ("STEP_END", "free_blocks")} <= fields


def other(value: Any) -> Any:  # noqa: ANN401 - of any field
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case (first, *rest):
            return type(value)([other(first), *rest])
    raise TypeError(value)


def test_what_the_trace_says_is_shown_and_what_follows_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each number that follows from others is changed in turn, in a prefill and in a decode."""
    sound = write_trace(tmp_path / "sound.jsonl", chunked_run())
    records: list[Any] = [*read_trace(sound)]
    for step in (2, 9):
        *_, end = (m for m in moments(records, inputs_of=step) if m.step == step)
        assert len(end.claims) > 10
        for claim in end.claims:
            changed = [
                msgspec.structs.replace(record, **{claim.field: other(claim.said)})
                if isinstance(record, ev.Event) and record.event_id == claim.event_id
                else record
                for record in records
            ]
            known = [r for r in changed if isinstance(r, Header | Footer | ev.Event)]
            trace = write_records(tmp_path / "changed.jsonl", known)
            told = call(capsys, "at", trace, str(step))
            if told.code:  # a schedule of tokens that there are not
                assert claim.event.startswith("SCHEDULE"), claim
                continue
            assert f"{claim.event} has {claim.field}" in " ".join(told.out.split()), claim
            found = json.loads(call(capsys, "at", trace, str(step), "--json").out)
            differs = [(one["event"], one["field"]) for one in found["differs"]]
            assert (claim.event, claim.field) in differs
            plain = call(capsys, "at", trace, str(step), "--plain").out
            assert f"\t{claim.event}\t{claim.field}\t" in plain
            if claim.field in {"context_lens", "cu_seqlens_q", "cu_seqlens_k", "slot_mapping"}:
                assert found["inputs"][claim.field] == other(claim.said)


def test_slots_are_shown_as_the_trace_says_them(capsys: pytest.CaptureFixture[str]) -> None:
    trace = ROOT / "docs" / "exercises" / "11-every-fourth-word-is-wrong.jsonl.zst"
    for moment in POINTS:
        step = ("6", "--moment", moment)
        shown = call(capsys, "at", trace, *step).out
        assert "4 + 3 = 11; recorded: 12" in shown
        assert json.loads(call(capsys, "at", trace, *step, "--json").out)["inputs"][
            "slot_mapping"
        ] == [12, 14, 20]
        assert "0\t11\t11\t2\t11\t11\t12" in call(capsys, "at", trace, *step, "--plain").out


def test_each_slot_is_block_times_block_size_plus_offset() -> None:
    recording = Recording(BUSY)
    size = BUSY.settings.kvcache_block_size
    num_runs = 0
    for step in range(1, recording.run.num_steps + 1):
        found = list(moments(recording.records, inputs_of=step))
        (inputs,) = {m.inputs for m in found if m.step == step and m.inputs is not None}
        for run in inputs.runs:
            num_runs += 1
            assert run.first_slot == run.block_id * size + run.first_position % size
            assert run.block_index == run.first_position // size
            assert len(run.token_ids) == run.last_position - run.first_position + 1
            assert run.last_slot < (run.block_id + 1) * size
    assert num_runs > 30


# -- conditions ------------------------------------------------------------------------------------

CONDITIONS = (
    "event == PREEMPT",
    "event == STATE_TRANSITION and status == FINISHED",
    "free_blocks < 2",
    "running_len >= 3 and waiting_len > 0",
    "not (kv_usage < 0.75 or shared_blocks == 0)",
    "2 in waiting",
    "event == BLOCKS_EVICT and free_blocks <= 3",
    "event == REQUEST_OUTPUT",
)


@given(
    workloads(),
    st.sampled_from(CONDITIONS),
    st.sampled_from([None, "schedule", "end"]),
    st.none() | st.integers(1, 30),
    st.sampled_from([1, 1500, 10**9]),
)
@example(BUSY, "event == PREEMPT", None, None, 1)
@example(BUSY, "event == REQUEST_OUTPUT", "schedule", 5, 1)
def test_a_search_finds_the_nearest_place_on_either_side(
    workload: Workload, text: str, point: Point | None, step: int | None, spacing_bytes: int
) -> None:
    recording, condition = Recording(workload), parse(text)
    places = list(matches(moments(recording.records), condition, point))
    after = [place for place in places if place.step >= (step or 0)]
    before = [place for place in places if step is None or place.step <= step]
    with film_of(recording.data, spacing_bytes) as film:
        forwards = film.find(condition, step=step, point=point)
        backwards = film.find(condition, step=step, point=point, is_backwards=True)
    assert forwards == (after[0] if after else None)
    assert backwards == (before[-1] if before else None)


def test_the_conditions_of_these_tests_hold_somewhere() -> None:
    records = Recording(BUSY).records
    for text in CONDITIONS:
        assert list(matches(moments(records), parse(text))), text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seq_id == 3", True),
        ("seq_id==3 and for_seq_id!=3", True),
        ("seq_id == 3 and for_seq_id == 3", False),
        ("seq_id == 4 or num_blocks_freed > 1", True),
        ("not seq_id == 4", True),
        ("not (seq_id == 3 or seq_id == 4)", False),
        ("seq_id == 4 and seq_id == 3 or seq_id == 3", True),
        ("seq_id == 4 and (seq_id == 3 or seq_id == 3)", False),
        ("event == PREEMPT", True),
        ("event == 'PREEMPT'", True),
        ("event != PREEMPT", False),
        ("phase == decode", True),
        ("step >= 7.0", True),
        ("step < -1", False),
        ("status == RUNNING", False),  # a preemption has no status: neither equal ...
        ("status != RUNNING", False),  # ... nor unequal
        ("phase < 3", False),
        ("2 in running", True),
        ("9 in running", False),
        ("free_blocks == 0", True),
        ("num_tokens_to_recompute == null", False),
    ],
)
def test_what_a_condition_means(text: str, *, expected: bool) -> None:
    state = State()
    state.running = [1, 2]
    event = ev.Preempt(
        event_id=1,
        ts_ns=0,
        step=7,
        phase="decode",
        seq_id=3,
        for_seq_id=1,
        num_blocks_freed=2,
        num_tokens_to_recompute=5,
    )
    assert parse(text).holds(state, [event]) is expected


def test_names_of_events_are_asked_of_one_and_the_same_event() -> None:
    def preempt(seq_id: int, for_seq_id: int) -> ev.Preempt:
        envelope = {"event_id": 1, "ts_ns": 0, "step": 1, "num_blocks_freed": 1}
        fields = {**envelope, "seq_id": seq_id, "for_seq_id": for_seq_id}
        return ev.Preempt(phase="decode", num_tokens_to_recompute=1, **fields)

    condition = parse("seq_id == 1 and for_seq_id == 2")
    assert not condition.holds(State(), [preempt(1, 9), preempt(9, 2)])
    assert condition.holds(State(), [preempt(9, 9), preempt(1, 2)])


@pytest.mark.parametrize(
    ("text", "column", "said"),
    [
        ("", 1, "expected a name"),
        ("free_blocks", 12, "expected =="),
        ("free_blocks <", 14, "expected a number or a word"),
        ("free_bloks < 10", 1, "did you mean free_blocks?"),
        ("free_blocks < ten", 15, "free_blocks is a number, and ten is not"),
        ("event == PREEMT", 10, "did you mean PREEMPT?"),
        ("event == 7", 10, "there is no event 7"),
        ("waiting == 3", 12, "ask 3 in waiting"),
        ("free_blocks < 10 waiting_len > 1", 18, "expected and, or, or the end"),
        ("(free_blocks < 10", 18, "expected )"),
        ("free_blocks < 10)", 17, "expected and, or, or the end"),
        ("free_blocks = 10", 13, "this means nothing here"),
        ("free_blocks < 10 and", 21, "expected a name"),
        ("free_blocks < 10 && 1", 18, "this means nothing here"),
        ("3 in", 5, "expected a name"),
        ("and == 3", 1, "expected a name"),
        ("__import__('os')", 1, "no state or event has __import__"),
        ("(" * 60 + "free_blocks < 1" + ")" * 60, 51, "nested more than 50 deep"),
    ],
)
def test_a_condition_that_is_none_is_refused_at_its_column(
    text: str, column: int, said: str
) -> None:
    with pytest.raises(QueryError) as raised:
        parse(text)
    assert f"column {column}: " in str(raised.value)
    assert said in str(raised.value)


@given(st.text(alphabet="free_blocks andortinevtSTEP_END=!<>()'\"0123456789.-", max_size=40))
def test_any_text_is_a_condition_or_a_clear_error(text: str) -> None:
    try:
        condition = parse(text)
    except QueryError as error:
        message = str(error)
    else:
        message = ""
        assert condition.holds(State(), []) in {True, False}
    assert not message or "column " in message


def test_every_field_of_a_state_can_be_asked() -> None:
    for moment in moments(Recording(BUSY).records):
        for name in STATE_FIELDS:
            text = f"0 in {name}" if name in {"waiting", "running"} else f"{name} >= 0"
            held = parse(text).holds(moment.state, [])
            assert held or " in " in text


# -- the index -------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """BUSY's trace in a file."""
    path = tmp_path / "busy.jsonl"
    path.write_bytes(Recording(BUSY).data)
    return path


def bytes_read(path: Path, step: int) -> tuple[list[int], str]:
    """How far a look at `step` read the trace from its start, and what it saw."""
    watched: list[int] = []
    moment = SeekableTrace(path, watch=watched.append, spacing_bytes=2000).at(step, "end")
    return watched, repr(snapshot_of_fold(moment.state))


def test_a_first_look_leaves_an_index_and_the_next_ones_use_it(trace: Path) -> None:
    first, seen = bytes_read(trace, 12)
    assert first[-1] == trace.stat().st_size
    names = {path.name for path in trace.parent.iterdir()}
    assert names == {trace.name, f"{trace.name}.nvindex"}
    second, seen_again = bytes_read(trace, 12)
    assert second == []
    assert seen_again == seen


def test_a_look_reads_no_further_back_than_the_snapshot_before(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    film = SeekableTrace(trace, spacing_bytes=2000)
    offsets: list[int] = []
    original = film._moments

    def noting(number: int, **options: bool) -> Iterator[Moment]:
        offsets.append(film._entries[number].offset)
        return original(number, **options)

    monkeypatch.setattr(film, "_moments", noting)
    film.at(film._last_step, "end")
    assert offsets[0] > trace.stat().st_size - 8000


@pytest.mark.parametrize("is_longer", [False, True])
def test_an_index_of_another_size_or_time_is_made_anew(trace: Path, *, is_longer: bool) -> None:
    bytes_read(trace, 3)
    if is_longer:
        trace.write_bytes(trace.read_bytes().replace(b'"TRACE_FOOTER"', b'"TRACE_FOOTER" '))
    else:
        os.utime(trace, ns=(1, 1))
    assert bytes_read(trace, 3)[0] != []
    assert bytes_read(trace, 3)[0] == []


@pytest.mark.parametrize("content", [b"", b"no index", b"\0" * 1000, None])
def test_an_index_that_is_none_is_made_anew(trace: Path, content: bytes | None) -> None:
    bytes_read(trace, 3)
    index = trace.with_name(f"{trace.name}.nvindex")
    index.write_bytes(index.read_bytes()[:-40] if content is None else content)
    assert bytes_read(trace, 3)[0] != []
    assert bytes_read(trace, 3)[0] == []


@pytest.mark.parametrize("place", [*(0, 1, 63, 64, 65, 100, 200), *(-1, -2, -8, -9, -40, -300)])
@pytest.mark.parametrize("bit", [0, 6])
def test_an_index_with_a_bit_flipped_is_made_anew(trace: Path, place: int, bit: int) -> None:
    bytes_read(trace, 3)
    index = trace.with_name(f"{trace.name}.nvindex")
    data = bytearray(index.read_bytes())
    data[place] ^= 1 << bit
    index.write_bytes(data)
    assert read_index(index) is None
    assert bytes_read(trace, 12)[0] != []
    data[place] ^= 1 << bit
    assert index.read_bytes() == data


def test_an_index_that_tells_what_none_can_is_made_anew(trace: Path) -> None:
    """Its digest is right: somebody made it so."""
    bytes_read(trace, 3)
    index = trace.with_name(f"{trace.name}.nvindex")
    data = index.read_bytes()[64:]
    for entries in (b'"entries":[]', b'"entries":[{"step":0,"offset":-1}]', b"{"):
        rest = data[:100] + b'{"size":1,"mtime_ns":1,"last_step":1,' + entries + b"}"
        for place in (164, 100, 2**63, len(rest) + 64):
            whole = rest + place.to_bytes(8, "little")
            index.write_bytes(hashlib.blake2b(whole).digest() + whole)
            assert read_index(index) is None


@pytest.mark.parametrize("kind", ["fifo", "folder", "link to a fifo"])
def test_an_index_that_is_no_plain_file_is_neither_opened_nor_replaced(
    trace: Path, kind: str
) -> None:
    index = trace.with_name(f"{trace.name}.nvindex")
    if kind == "folder":
        index.mkdir()
    else:
        fifo = index if kind == "fifo" else trace.with_name("fifo")
        os.mkfifo(fifo)
        if kind != "fifo":
            index.symlink_to(fifo)
    mode = index.lstat().st_mode
    seen = SeekableTrace(trace, spacing_bytes=2000).at(12, "end")
    assert snapshot_of_fold(seen.state) == snapshot_of_fold(
        SeekableTrace(trace).at(12, "end").state
    )
    assert index.lstat().st_mode == mode


def test_an_index_that_was_changed_after_it_was_opened_is_named(trace: Path) -> None:
    film = SeekableTrace(trace, spacing_bytes=2000)
    data = bytearray(film.index_path.read_bytes())
    data[80:600] = bytes(520)
    film.index_path.write_bytes(data)
    with pytest.raises(UnreadableTraceError, match=r"nvindex was changed while it was read"):
        film.at(film._entries[1].step + 1, "end")


def test_a_pipe_is_looked_into_as_a_file_is(folder: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = gzip.compress((folder / "crowded.jsonl").read_bytes())
    expected = spawn("at", folder / "crowded.jsonl", "--json")
    with ThreadPoolExecutor() as threads:
        threads.submit(pipe.write_bytes, content)
        assert spawn("at", pipe, "--json") == expected


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "is empty"), (b"Dear diary,\n", "is not an nvtrace trace")]
)
@pytest.mark.parametrize("command", ["at", "replay", "stats", "check", "validate"])
def test_standard_input_is_called_so(command: str, content: bytes, said: str) -> None:
    outcome = spawn(command, "-", stdin=content)
    if command == "validate" and content:  # it tells what is wrong with each line
        assert (outcome.code, outcome.out[:7]) == (1, "line 1:")
    else:
        assert (outcome.code, outcome.out) == (3, "")
        assert outcome.err.startswith(f"nvtrace: standard input {said}")


def test_where_no_index_can_be_written_every_look_reads_from_the_start(trace: Path) -> None:
    trace.with_name(f"{trace.name}.nvindex").mkdir()  # in the way
    expected = SeekableTrace(trace, spacing_bytes=10**9).at(12, "end")
    seen = SeekableTrace(trace, spacing_bytes=2000).at(12, "end")
    assert snapshot_of_fold(seen.state) == snapshot_of_fold(expected.state)
    assert len(list(trace.parent.iterdir())) == 2, "an unfinished index was left behind"


def test_a_small_trace_gets_no_index(trace: Path) -> None:
    SeekableTrace(trace).at(1, "end")
    assert [path.name for path in trace.parent.iterdir()] == [trace.name]


def test_a_cut_trace_is_indexed_as_far_as_it_goes(trace: Path) -> None:
    trace.write_bytes(trace.read_bytes()[:-200])
    warnings: list[str] = []
    last = SeekableTrace(trace, warn=warnings.append, spacing_bytes=2000).at(None, "end").step
    assert any("is cut" in warning for warning in warnings)
    assert SeekableTrace(trace, warn=pytest.fail, spacing_bytes=2000).at(None, "end").step == last


# -- the command -----------------------------------------------------------------------------------


pytestmark = pytest.mark.usefixtures("eighty_columns")


def test_the_articles_first_step_spells_its_slots_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = call(capsys, "at", folder / "article.jsonl", "1").out
    assert "article.jsonl, step 1, at its end" in out
    assert "0 × 256 + 0..10 = 0..10" in out  # noqa: RUF001 - a times sign
    assert "1 × 256 + 0..16 = 256..272" in out  # noqa: RUF001 - the same
    assert "cu_seqlens_q  0, 11, 28" in out
    assert "running       2: 0, 1" in out


def test_until_stops_at_the_first_preemption_and_backwards_at_the_last(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = folder / "crowded.jsonl"
    search = ("at", trace, "--until", "event == PREEMPT", "--json")
    first, last = (json.loads(call(capsys, *search, *o).out) for o in ((), ("--backwards",)))
    preemptions = [record.step for record in read_trace(trace) if isinstance(record, ev.Preempt)]
    assert (first["engine_step"], last["engine_step"]) == (preemptions[0], preemptions[-1])
    assert first["moment"] == "schedule"
    assert "PREEMPT" in first["events"]
    ended = json.loads(call(capsys, *search, "--moment", "end").out)
    assert (ended["engine_step"], ended["moment"]) == (preemptions[0], "end")


def test_json_holds_the_whole_state(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(call(capsys, "at", folder / "crowded.jsonl", "12", "--json").out)
    moment = SeekableTrace(folder / "crowded.jsonl").at(12, "end")
    state = moment.state
    assert (told["waiting"], told["running"]) == (state.waiting, state.running)
    assert told["pool"]["free_blocks"] == list(state.free_blocks)
    refs = {block["block_id"]: block["ref_count"] for block in told["pool"]["blocks"]}
    assert {b: n for b, n in refs.items() if n} == {
        b: n for b, n in enumerate(state.ref_counts) if n
    }
    hashes = {block["block_id"]: block["hash"] for block in told["pool"]["blocks"]}
    assert {b: h for b, h in hashes.items() if h} == state.block_hashes
    tables = {request["seq_id"]: request["block_table"] for request in told["requests"]}
    assert tables == {s: seq.block_table for s, seq in state.sequences.items()}
    assert moment.inputs is not None
    assert told["inputs"]["slot_mapping"] == [run.first_slot for run in moment.inputs.runs]


def test_plain_is_five_tables_with_tabs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "at", folder / "crowded.jsonl", "12", "--plain").out
    tables = (part.splitlines() for part in out.rstrip().split("\n\n"))
    facts, requests, pages, inputs, differs = tables
    assert differs == ["event_id\tevent\tfield\tsaid\tfollows"]
    assert [line.split("\t")[-1] for line in inputs[1:]] == [
        line.split("\t")[-2] for line in inputs[1:]
    ]
    assert facts[:2] == ["engine_step\t12", "moment\tend"]
    assert "waiting\t3" in facts
    names = requests[0].split("\t")
    rows = [dict(zip(names, line.split("\t"), strict=True)) for line in requests[1:]]
    assert [row["seq_id"] for row in rows] == ["0", "1", "2", "3"]
    assert rows[0]["block_table"].split()[:3] == ["0", "1", "2"]
    assert all(len(line.split("\t")) == 3 for line in pages)
    assert len(inputs) == 1 + 3


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("moment", POINTS)
@pytest.mark.parametrize("place", ["article.jsonl 1", "crowded.jsonl 12", "chunked.jsonl 3"])
def test_the_picture_stays_within_80_columns(
    place: str, moment: Point, lang: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, step = place.split()
    options = ("--moment", moment, "--lang", lang)
    outcome = call(capsys, "at", folder / name, step, *options)
    assert (outcome.code, outcome.err) == (0, "")
    assert max(map(cell_len, outcome.out.splitlines())) <= 80
    assert "…" not in outcome.out
    assert "█" in outcome.out


def test_ascii_terminals_get_an_ascii_map(folder: Path) -> None:
    outcome = spawn("at", folder / "crowded.jsonl", "12", PYTHONIOENCODING="ascii")
    assert outcome.code == 0
    assert "   0  pppppppp pcc#ppp# ppp#" in outcome.out
    assert outcome.out.isascii()


def test_shared_blocks_show_how_many_share_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "busy.jsonl"
    trace.write_bytes(Recording(BUSY).data)
    found = call(capsys, "at", trace, "--until", "shared_blocks > 0", "--json")
    pages = json.loads(found.out)["pool"]["blocks"]
    shared = [page["ref_count"] for page in pages if page["ref_count"] > 1]
    assert shared
    picture = call(capsys, "at", trace, "--until", "shared_blocks > 0").out
    row = picture.partition("KV blocks")[2].splitlines()[1]
    assert row.count("2") == len(shared)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["99999"], 2, "has no step 99999: it has steps 1 to 38"),
        (["--backwards"], 2, "needs --until"),
        (["1", "--json", "--plain"], 2, "give one"),
        (["--until", "free_blocks <"], 2, "column 14"),
        (["--until", "free_blocks < 0"], 1, "is true nowhere in crowded.jsonl"),
        (["9", "--until", "free_blocks < 0"], 1, "from step 9"),
        (["9", "--until", "event == ENGINE_RESET", "--backwards"], 1, "up to step 9"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    arguments: list[str], code: int, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "at", folder / "crowded.jsonl", *arguments)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (code, "", 1)
    assert said in outcome.err


def test_what_is_no_trace_is_one_line_and_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "diary").write_bytes(b"Dear diary,\n")
    for name, said in (("none", "no such file"), ("diary", "not an nvtrace trace"), ("", "folder")):
        outcome = call(capsys, "at", tmp_path / name, "1")
        assert (outcome.code, outcome.out) == (3, "")
        assert said in outcome.err


def test_a_first_look_at_a_large_trace_says_what_it_leaves_behind(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nvtrace.snapshots.SPACING_BYTES", 2000)
    trace = tmp_path / "crowded.jsonl"
    trace.write_bytes((folder / "crowded.jsonl").read_bytes())
    first, second = call(capsys, "at", trace, "30"), call(capsys, "at", trace, "30")
    assert f"{trace}.nvindex was made" in first.err
    assert second.err == ""
    assert second.out == first.out


def test_stdin_and_compressed_traces_are_looked_into(folder: Path, tmp_path: Path) -> None:
    import zstandard  # noqa: PLC0415 - for this test only

    content = (folder / "crowded.jsonl").read_bytes()
    (tmp_path / "crowded.jsonl.zst").write_bytes(zstandard.compress(content))
    search = ("--until", "event == PREEMPT", "--json")
    expected = spawn("at", folder / "crowded.jsonl", *search)
    assert expected.code == 0
    assert spawn("at", "-", *search, stdin=content) == expected
    assert spawn("at", tmp_path / "crowded.jsonl.zst", *search) == expected


def test_a_step_that_broke_off_before_its_schedule_has_its_end_only(tmp_path: Path) -> None:
    recording = Recording(BUSY, Interruption(2, "state_transition"))
    path = tmp_path / "broken.jsonl"
    path.write_bytes(recording.data)
    broken = next(
        moment.step
        for moment in moments(recording.records)
        if moment.point == "end" and moment.schedule is None
    )
    assert SeekableTrace(path).at(broken, "end").schedule is None
    with pytest.raises(NoSuchStepError, match="has no schedule: it failed"):
        SeekableTrace(path).at(broken, "schedule")
