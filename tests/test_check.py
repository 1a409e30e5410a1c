"""nvtrace check: silent about every sound engine, loud about every other."""

from __future__ import annotations

import ast
import io
import json
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.policies import POLICIES
from nvtrace import events as ev
from nvtrace.catalog import LANGUAGES, load_catalog
from nvtrace.check import INVARIANTS, Checker, Fact, Finding, check
from nvtrace.envelope import Header, Record, Unknown
from nvtrace.pipeline import Sink
from nvtrace.ranks import RankRecorder
from nvtrace.reader import read_trace
from nvtrace.recorder import record
from nvtrace.reference import RECORD_TYPES
from nvtrace_cli.check import Watch
from support.cli import call
from support.cli_traces import write_records
from support.docs import DOCS
from support.faults import EXERCISES, FAULTS, Fault, record_fault, record_sound
from support.fuzz import draw_case
from support.mutations import Mutant, caught_by_kind, is_caught, table, traces
from support.oracle import Oracle, save_tokenizer
from support.recording import BUSY, BUSY_MIXED, HOOKS_OF_A_STEP, Interruption, Recording
from support.workload import MemoryFile, Run, Workload, workloads

if TYPE_CHECKING:
    from pathlib import Path

    from nanovllm.engine.batch import Batch
    from nanovllm.engine.scheduler import Scheduler
    from nvtrace.catalog import Catalog

INTERRUPTIONS = st.builds(
    Interruption,
    step=st.integers(1, 12),
    at=st.sampled_from(("scheduled", "ran", "sampled", *HOOKS_OF_A_STEP)),
    is_noted=st.booleans(),
)


@pytest.fixture(scope="module")
def sources() -> list[list[Record]]:
    return traces()


@pytest.fixture(params=LANGUAGES)
def catalog(request: pytest.FixtureRequest) -> Catalog:
    return load_catalog(request.param)


def changed(records: list[Record], kind: type[ev.Event], **fields: object) -> list[Record]:
    """The records with these fields of the first event of a kind changed."""
    index = next(i for i, item in enumerate(records) if isinstance(item, kind))
    new: Any = msgspec.structs.replace(records[index], **fields)
    return [*records[:index], new, *records[index + 1 :]]


# -- a sound engine --------------------------------------------------------------------------------


@given(workloads())
@example(BUSY)
@example(BUSY_MIXED)
def test_nothing_is_found_in_the_trace_of_any_workload(workload: Workload) -> None:
    assert list(check(Recording(workload).records)) == []


@given(workloads(), INTERRUPTIONS)
def test_nothing_is_found_after_an_exception_anywhere_in_a_step(
    workload: Workload, interruption: Interruption
) -> None:
    assert list(check(Recording(workload, interruption).records)) == []


@pytest.mark.parametrize("index", range(8))
def test_nothing_is_found_in_longer_and_harsher_workloads(index: int) -> None:
    assert list(check(Recording(draw_case(7, index).workload).records)) == []


def test_nothing_is_found_where_there_are_graphs_calls_and_cache_resets(
    sources: list[list[Record]],
) -> None:
    told = {
        ev.tag_of(item) for records in sources for item in records if isinstance(item, ev.Event)
    }
    assert told == set(ev.EVENT_TYPES)
    assert [finding for records in sources for finding in check(records)] == []


def decodes_then_cuts_any_prompt(scheduler: Scheduler, batch: Batch) -> None:
    scheduler.decode(batch)
    scheduler.continue_prefill(batch)
    scheduler.admit(batch, chunk_any=True)


@pytest.mark.parametrize("workload", [BUSY, *(draw_case(7, index).workload for index in range(4))])
def test_a_policy_of_your_own_is_judged_by_what_holds_for_every_policy(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "mine", decodes_then_cuts_any_prompt)
    settings = replace(workload.settings, policy="mine")
    records = Recording(replace(workload, settings=settings)).records
    assert list(check(records)) == []
    overfull = changed(records, ev.SchedulePrefill, num_batched_tokens=10**6)
    assert "budgets" in {finding.invariant for finding in check(overfull)}


def test_a_trace_is_checked_by_its_events_alone_as_a_tap_hears_them() -> None:
    checker = Checker()
    records = [item for item in Recording(BUSY).records if isinstance(item, ev.Event)]
    assert [finding for item in records for finding in checker.take(item)] == []
    assert checker.num_events == len(records)


def test_an_ended_request_is_forgotten() -> None:
    checker = Checker()
    for item in Recording(BUSY).records:
        checker.take(item)
    ledger = checker._ledger
    assert not ledger.state.sequences
    assert not ledger.requests
    assert not ledger._chains
    assert not ledger.outputs_due


def test_an_event_of_a_newer_version_is_passed_over() -> None:
    records = Recording(BUSY).records
    place = next(i for i, item in enumerate(records) if isinstance(item, ev.StepEnd)) + 1
    later: list[Record] = []
    for item in records[place:]:
        assert not isinstance(item, Header | Unknown)
        later.append(msgspec.structs.replace(item, event_id=item.event_id + 1))
    later[-1] = msgspec.structs.replace(later[-1], num_events=later[-1].event_id - 1)  # type: ignore[union-attr]  # the footer
    unknown = Unknown(event="SPECULATE", fields={"event_id": place})
    assert list(check([*records[:place], unknown, *later])) == []


def test_a_rank_that_hears_of_no_request_is_asked_for_numbers_and_times_alone() -> None:
    file = MemoryFile()
    recorder = RankRecorder(Sink(file), 1, "x")
    recorder.trace.write_header({}, {}, 1, 2)
    init = next(item for item in Recording(BUSY).records if isinstance(item, ev.EngineInit))
    envelope = {"event_id", "ts_ns", "step", "phase"}
    fields = {k: v for k, v in msgspec.structs.asdict(init).items() if k not in envelope}
    recorder.trace.add(ev.EngineInit, "bootstrap", **{**fields, "tp_size": 2})
    recorder.tp_runtime_init(1, 2, "cpu", "gloo")
    for step in (1, 2):
        recorder.step_start(step)
        recorder.run_eager("prefill", 5)
    recorder.close()
    records = list(read_trace(io.BytesIO(file.contents)))
    assert list(check(records)) == []
    [finding] = check(changed(records, ev.RunEager, ts_ns=0))
    assert finding.invariant == "times"


# -- an unsound trace ------------------------------------------------------------------------------


def test_at_least_95_in_100_single_fact_corruptions_are_caught(sources: list[list[Record]]) -> None:
    by_kind, _ = caught_by_kind(sources, per_kind=25)
    assert set(by_kind) == set(ev.EVENT_TYPES)
    caught = sum(caught for caught, _ in by_kind.values())
    made = sum(made for _, made in by_kind.values())
    assert caught / made >= 0.95, table(by_kind)
    assert min(caught / made for caught, made in by_kind.values()) >= 0.5, table(by_kind)


@pytest.mark.parametrize("trace", [0, 1, 2], ids=["prefill_first", "mixed", "static"])
def test_every_step_without_one_of_its_events_is_caught(
    sources: list[list[Record]], trace: int
) -> None:
    records = sources[trace]
    places = [i for i, item in enumerate(records) if isinstance(item, ev.Event) and item.step]
    whole = Mutant("", "", records)
    assert not is_caught(whole)
    for place in places[:60]:
        rest = [*records[:place], *records[place + 1 :]]
        assert is_caught(replace(whole, records=rest)), records[place]


def test_a_finding_names_the_two_facts_the_step_and_the_event() -> None:
    records = Recording(BUSY).records
    index = next(i for i, item in enumerate(records) if isinstance(item, ev.BlocksAllocate))
    event = records[index]
    assert isinstance(event, ev.BlocksAllocate)
    first, *_ = check(changed(records, ev.BlocksAllocate, block_ids=[[0, 2, 1]]))
    assert first == Finding(
        "free_list",
        event.step,
        event.event_id,
        "BLOCKS_ALLOCATE",
        Fact("block_ids", [0, 2, 1]),
        Fact("free_list_head", [0, 1, 2]),
    )


def test_checking_goes_on_after_an_event_that_cannot_be_applied() -> None:
    records = Recording(BUSY).records
    broken = changed(records, ev.BlocksRelease, seq_ids=[99])
    last = next(item for item in reversed(records) if isinstance(item, ev.StepEnd))
    broken[records.index(last)] = msgspec.structs.replace(last, wall_ns=last.wall_ns + 1)
    findings = list(check(broken))
    assert findings[0].invariant == "names"
    assert "follows" in {finding.invariant for finding in findings}
    assert (last.event_id, "step_times") in {(f.event_id, f.invariant) for f in findings}


def test_of_one_event_each_invariant_is_told_once() -> None:
    records = changed(Recording(BUSY).records, ev.PreparePrefillTensors, n_seqs=9, flat_tokens=9)
    assert [finding.invariant for finding in check(records)] == ["layout"]


@pytest.mark.parametrize(
    ("kind", "fields", "invariant"),
    [
        (ev.EngineReady, {"num_kvcache_blocks": 10**9}, "follows"),
        (ev.EngineReady, {"eos_sources": ["tokenizer"] * 2}, "pool_size"),
        (ev.EngineReady, {"eos_sources": ["config.json"] * 3}, "pool_size"),
        (ev.EngineInit, {"block_size": 0}, "settings"),
        (ev.RequestEnqueue, {"max_tokens": 10**12}, "request_facts"),
        (ev.BlocksAllocate, {"block_ids": [[-1]]}, "names"),
        (ev.SchedulePrefill, {"num_scheduled_tokens": [10**15]}, "budgets"),
        (ev.CudagraphReplay, {"graph_batch_size": 10**9}, "graph_size"),
    ],
)
def test_facts_of_any_size_are_judged(
    sources: list[list[Record]], kind: type[ev.Event], fields: dict[str, Any], invariant: str
) -> None:
    records = sources[4 if kind is ev.CudagraphReplay else 0]  # the one that knows its graphs
    assert invariant in {finding.invariant for finding in check(changed(records, kind, **fields))}


# -- broken engines --------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_of_an_exercise_is_found_and_the_engine_without_it_is_sound(
    fault: Fault, tmp_path: Path
) -> None:
    made, sound = tmp_path / "made.jsonl", tmp_path / "sound.jsonl"
    record_fault(fault, made)
    record_sound(fault.workload, sound)
    assert list(check(read_trace(sound, warn=pytest.fail))) == []
    found = list(check(read_trace(made, warn=pytest.fail)))
    assert found[0].invariant == fault.invariant
    shipped = EXERCISES / f"{fault.name}.jsonl.zst"
    assert list(check(read_trace(shipped, warn=pytest.fail))) == found, "make exercises anew"


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_exercise_is_asked_and_solved(language: str) -> None:
    names = {fault.name for fault in FAULTS}
    assert {path.name.partition(".")[0] for path in EXERCISES.glob("*.zst")} == names
    asked, solved = (
        (DOCS / language / f"{page}.md").read_text("utf-8") for page in ("exercises", "solutions")
    )
    assert [name for name in names if name not in asked or name not in solved] == []
    assert [f.invariant for f in FAULTS if f"`{f.invariant}`" in asked] == []
    assert [f.invariant for f in FAULTS if f"`{f.invariant}`" not in solved] == []


# -- words -----------------------------------------------------------------------------------------


def names_of_facts() -> set[str]:
    """Every code that the rules name, by their source: Fact("code", ...), differ(..., "code")."""
    found: set[str] = set()
    for file in resources.files("nvtrace.check").iterdir():
        if not file.name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="Fact"), args=[ast.Constant(value=str(name)), *_]):
                    found.add(name)
                case ast.Call(func=ast.Name(id="differ"), args=[told, _, known, _]):
                    codes = [arg.value for arg in (told, known) if isinstance(arg, ast.Constant)]
                    found.update(map(str, codes))
    return found


def test_every_invariant_and_every_fact_has_its_words(catalog: Catalog) -> None:
    for name in INVARIANTS:
        title, teaches = catalog.invariant(name)
        assert title
        assert teaches.endswith((".", "。"))
    fields = {f.name for kind in RECORD_TYPES.values() for f in msgspec.structs.fields(kind)}
    own_names = {*fields, *(f"len({name})" for name in fields)}
    named = names_of_facts()
    assert len(named) > 80
    assert [n for n in named if catalog.fact(n) == n and n not in {*own_names, "event"}] == []


def test_no_invariant_and_no_fact_is_left_over(catalog: Catalog) -> None:
    assert set(catalog._check["invariants"]) == set(INVARIANTS)
    assert set(catalog._check["facts"]) - names_of_facts() == set()


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "sound.jsonl"
    path.write_bytes(Recording(BUSY).data)
    return path


@pytest.fixture
def unsound(tmp_path: Path) -> Path:
    records: Any = changed(Recording(BUSY).records, ev.SchedulePrefill, free_blocks=7)
    return write_records(tmp_path / "unsound.jsonl", records)


def test_a_sound_trace_ends_with_0_and_one_line(
    sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "check", sound, "--lang", "en")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.endswith(f"{len(INVARIANTS)} invariants: nothing disagrees\n")
    assert call(capsys, "check", sound, "--json").out == ""


def test_an_unsound_trace_ends_with_1_and_says_what_disagrees_and_what_it_teaches(
    unsound: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = call(capsys, "check", unsound, "--lang", "en")
    assert outcome.code == 1
    assert "free_blocks is 7, but the free list is 5" in outcome.out
    assert "SCHEDULE_PREFILL: no page is lost and none is made" in outcome.out
    assert "a leak shows as" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "空闲链表" in call(capsys, "check", unsound, "--lang", "zh").out


def test_json_is_one_object_a_finding_and_plain_one_line(
    unsound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "check", unsound, "--json", "--lang", "en")
    [found] = map(json.loads, outcome.out.splitlines())
    assert outcome.code == 1
    assert (found["invariant"], found["event"], found["step"]) == (
        "conservation",
        "SCHEDULE_PREFILL",
        1,
    )
    assert [fact["value"] for fact in found["facts"]] == [7, 5]
    plain = call(capsys, "check", unsound, "--plain")
    header, row = (line.split("\t") for line in plain.out.splitlines())
    assert len(header) == len(row) == 8
    assert row[4:] == ["free_blocks", "7", "free_pages", "5"]
    assert call(capsys, "check", unsound, "--json", "--plain").code == 2


def test_ten_findings_are_shown_and_all_of_them_if_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    many = EXERCISES / "02-the-longer-it-runs-the-fewer-fit.jsonl.zst"
    few = call(capsys, "check", many, "--lang", "en")
    every = call(capsys, "check", many, "--lang", "en", "--all")
    number = len(call(capsys, "check", many, "--json").out.splitlines())
    assert f"{number - 10} more" in few.out
    assert "more;" not in every.out
    assert few.out.count(", event ") == 10
    assert every.out.count(", event ") == number


def test_a_trace_that_cannot_be_read_ends_with_3_and_a_newer_one_with_4(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(capsys, "check", tmp_path / "none.jsonl").code == 3
    newer = tmp_path / "newer.jsonl"
    newer.write_bytes(sound.read_bytes().replace(b'"version":[1,0]', b'"version":[2,0]'))
    assert call(capsys, "check", newer).code == 4


def test_every_fact_of_every_finding_can_be_written_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sources: list[list[Record]]
) -> None:
    _, missed = caught_by_kind(sources, per_kind=1)
    assert len(missed) < len(ev.EVENT_TYPES)
    for fault in FAULTS:
        path = EXERCISES / f"{fault.name}.jsonl.zst"
        lines = call(capsys, "check", path, "--json").out.splitlines()
        assert all(len(json.loads(line)["facts"]) == 2 for line in lines)
    strange: Any = changed(Recording(BUSY).records, ev.RequestAbort, seq_id=99)
    outcome = call(capsys, "check", write_records(tmp_path / "strange.jsonl", strange), "--json")
    assert outcome.code == 1
    assert json.loads(outcome.out.splitlines()[0])["invariant"] == "names"


# -- a run under way -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    oracle = Oracle.create(tmp_path_factory.mktemp("model"), {"eos_token_id": 127})
    save_tokenizer(oracle.folder)
    return oracle


def checked_run(oracle: Oracle, out: Path) -> list[str | Path]:
    asked = ("--prompt", "w5 w6 w7", "--prompt", "w8", "--temperature", "0", "--max-tokens", "4")
    return ["run", "example", "--model", oracle.folder, *asked, "--out", out, "--check", "-q"]


def test_a_sound_run_is_checked_in_silence(
    oracle: Oracle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    outcome = call(capsys, *checked_run(oracle, trace))
    assert (outcome.code, outcome.err) == (0, "")
    assert list(check(read_trace(trace, warn=pytest.fail))) == []


def test_a_finding_of_a_run_under_way_is_a_loud_line_and_its_end_is_1(
    oracle: Oracle,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take_from_the_tail(self: BlockManager, num_blocks: int) -> list[int]:
        block_ids = [self.free_blocks.popitem()[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        return block_ids

    monkeypatch.setattr(BlockManager, "_take_blocks", take_from_the_tail)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    outcome = call(capsys, *checked_run(oracle, tmp_path / "trace.jsonl"))
    assert outcome.code == 1
    assert outcome.out
    first, *_, last = outcome.err.splitlines()
    assert first.startswith("nvtrace: CHECK: step 1, event ")
    assert "but the free list's head is [0]" in first
    assert "trace.jsonl shows them" in last


def test_a_run_with_hundreds_of_findings_says_the_first_twenty(
    capsys: pytest.CaptureFixture[str],
) -> None:
    watch = Watch(load_catalog("en"), is_on=True)
    events: Any = [item for item in Recording(BUSY).records if isinstance(item, ev.Event)]
    heard: list[int] = []
    tap = watch.beside(lambda batch: heard.append(len(batch)))
    tap([msgspec.structs.replace(event, phase="egress") for event in events])
    assert heard == [len(events)]
    assert capsys.readouterr().err.count("CHECK") == 20


def test_a_recorder_gives_its_tap_what_the_check_needs(tmp_path: Path) -> None:
    checker = Checker()
    found: list[Finding] = []

    def tap(events: list[ev.Event]) -> None:
        for event in events:
            found.extend(checker.take(event))  # type: ignore[arg-type]  # it has no others

    with record(tmp_path / "trace.jsonl", tap=tap) as recorder:
        Run(BUSY, recorder).go()
    assert found == []
    assert checker.num_events > 100
