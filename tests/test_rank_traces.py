"""One trace for each rank: where it lies, what is in it, and how all are read together."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from nanovllm.config import Config
from nanovllm.engine.model_inputs import DecodeInputs, PrefillInputs
from nanovllm.utils.model_config import ModelConfig
from nvtrace import events as ev
from nvtrace import load
from nvtrace.catalog import load_catalog
from nvtrace.caveats import about_rank, saying_whose
from nvtrace.envelope import Footer, Header, Unknown
from nvtrace.pipeline import Sink
from nvtrace.ranks import keep_ranks
from nvtrace.reader import UnreadableTraceError, rank_path, read_ranks, read_trace
from nvtrace.recorder import RankRecipe, RankRecorder, record
from nvtrace_cli.main import run_command
from nvtrace_cli.run import recording, stopping_between_steps
from support.cli import ROOT, call, command, environment
from support.cli_traces import write_records
from support.oracle import Oracle, save_tokenizer
from support.ranks import worker_pids
from support.workload import MemoryFile

if TYPE_CHECKING:
    from nvtrace.envelope import Record


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    oracle = Oracle.create(tmp_path_factory.mktemp("model"), {"eos_token_id": 127})
    save_tokenizer(oracle.folder)
    return oracle


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trace.jsonl", "trace.rank3.jsonl"),
        ("trace.1.jsonl", "trace.1.rank3.jsonl"),
        ("my.run.jsonl.gz", "my.run.rank3.jsonl.gz"),
        ("trace.zst", "trace.rank3.zst"),
        ("trace", "trace.rank3"),
    ],
)
def test_a_ranks_trace_lies_beside_that_of_rank_0(name: str, expected: str) -> None:
    assert rank_path(Path("runs") / name, 3) == Path("runs") / expected
    assert rank_path(Path("runs") / name, 0) == Path("runs") / name


# -- a rank's own trace, read alone ----------------------------------------------------------------

RANK_1 = ROOT / "docs" / "traces" / "two-ranks.rank1.jsonl.zst"


@pytest.mark.parametrize("name", ["trace.jsonl", "my.run.jsonl.gz", "trace"])
def test_a_ranks_trace_names_rank_0s(name: str) -> None:
    path = Path("runs") / name
    assert about_rank(rank_path(path, 3), 3).endswith(f"are in rank 0's, {path}")
    assert about_rank("elsewhere.jsonl", 3).endswith("are in rank 0's trace")
    assert about_rank("-", 3).startswith("standard input is rank 3's own trace")


@pytest.mark.parametrize(
    "command",
    [
        *("replay", "replay --json", "replay --plain", "stats", "check"),
        *("explain --step 3", "explain --seq 0", "at 3", "whatif", "export --to perfetto"),
        "export --to otlp",
    ],
)
def test_every_command_says_whose_trace_it_is(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command.split()
    done = call(capsys, name, RANK_1, *options)
    assert f"{RANK_1} is rank 1's own trace" in done.err
    assert f"rank 0's, {rank_path(RANK_1.with_name('two-ranks.jsonl.zst'), 0)}" in done.err
    told = done.out + done.err
    for wrong in ("ends within", "cache is off", "cut short", "0 finished"):
        assert wrong not in told


def test_what_a_rank_computed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [r.split("\t") for r in call(capsys, "replay", RANK_1, "--plain").out.splitlines()]
    assert [row[:8] for row in rows[1:]] == [
        ["1", "1", "prefill", "2", "28", "", "", ""],
        ["2", "176", "decode", "2", "2", "", "", ""],
        ["177", "177", "decode", "1", "1", "", "", ""],
        ["178", "256", "decode", "1", "1", "", "", ""],
    ]
    first = json.loads(call(capsys, "replay", RANK_1, "--json").out.splitlines()[0])
    assert (first["scheduled"], first["waiting_len"], first["free_blocks"]) == (2, None, None)
    assert "256 = 1 prefill + 255 decode" in call(capsys, "replay", RANK_1).out
    stats = call(capsys, "stats", RANK_1).out
    assert "decode      255     1.7      430" in stats
    assert "requests" not in stats
    assert "PREPARE_DECODE_TENSORS" in call(capsys, "at", RANK_1, "3").out
    assert "step 3 decode" in call(capsys, "export", RANK_1, "--to", "perfetto").out


def test_beside_rank_0s_it_is_not_said(capsys: pytest.CaptureFixture[str]) -> None:
    first = RANK_1.with_name("two-ranks.jsonl.zst")
    assert call(capsys, "replay", first).err == ""
    warnings: list[str] = []
    assert sum(1 for _ in read_ranks(first, warn=warnings.append)) > 1000
    assert warnings == []
    assert load(first).warnings == ()
    (said,) = load(RANK_1).warnings
    assert "is rank 1's own trace" in said
    assert len(load(RANK_1).steps) == 256


def test_a_rank_that_decides_as_torchruns_do_is_like_any_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [*read_trace(RANK_1.with_name("example.jsonl.zst"))]
    header = msgspec.structs.replace(cast("Header", records[0]), rank=1, world_size=2)
    rest = [record for record in records[1:] if not isinstance(record, Header | Unknown)]
    warnings: list[str] = []
    assert len([*saying_whose([header, *rest], "t.jsonl", warnings.append)]) == len(records)
    assert warnings == []
    trace = write_records(tmp_path / "t.jsonl", [header, *rest])
    assert call(capsys, "stats", trace).err == ""
    assert load(trace).warnings == ()


def test_older_traces_of_all_ranks_are_kept_together(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for rank in range(3):
        rank_path(path, rank).write_text(f"old {rank}", encoding="utf-8")
    with record(path) as recorder:
        pass
    assert recorder.kept == tmp_path / "trace.1.jsonl"
    for rank in range(3):
        kept = rank_path(recorder.kept, rank)
        assert kept.read_text(encoding="utf-8") == f"old {rank}"
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *("trace.1.jsonl", "trace.1.rank1.jsonl", "trace.1.rank2.jsonl", "trace.jsonl")
    ]


def test_keeping_stops_where_there_is_no_more(tmp_path: Path) -> None:
    keep_ranks(tmp_path / "trace.jsonl", tmp_path / "trace.1.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_ready", [True, False])
@pytest.mark.parametrize("has_rank_0", [True, False])
def test_of_every_older_trace_it_is_said_where_it_is_now(
    tmp_path: Path,
    oracle: Oracle,
    capsys: pytest.CaptureFixture[str],
    *,
    has_rank_0: bool,
    is_ready: bool,
) -> None:
    path = tmp_path / "a.jsonl"
    older = {rank_path(path, rank): f"old {rank}" for rank in range(not has_rank_0, 3)}
    for file, text in older.items():
        file.write_text(text, encoding="utf-8")
    with (
        stopping_between_steps(lambda _events: None) as tap,
        recording(path, tap, load_catalog("en")) as recorder,
    ):
        config = Config.create(oracle.folder, {"tensor_parallel_size": 2})
        recorder.engine_init(config, ModelConfig.from_folder(oracle.folder))
        tap.has_engine = is_ready
    told = dict(
        re.findall("nvtrace: (.*) already existed: it is now (.*)\n", capsys.readouterr().err)
    )
    renamed = [*older] if has_rank_0 else [rank_path(path, 1)]
    assert [*told] == ([str(file) for file in renamed] if is_ready else [])
    for file, text in older.items():
        assert Path(told.get(str(file), file)).read_text(encoding="utf-8") == text


def test_the_traces_of_several_ranks_do_not_go_beside_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    told = call(capsys, "run", "example", "--tp", "2", "--out", tmp_path / "pipe")
    assert (told.code, "not a regular file" in told.err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_no_ranks_trace_goes_where_a_stream_goes(
    stream: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "r.rank2.jsonl"
    with taken.open("w+", encoding="utf-8") as file:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        done = subprocess.run(
            command("run", "example", "--tp", "3", "--device", "cpu", "--out", "r.jsonl"),
            **streams | {stream: file},
            text=True,
            env=environment(),
            cwd=tmp_path,
            check=False,
        )
    said = done.stderr or taken.read_text("utf-8")
    assert done.returncode == 2
    assert "--out r.rank2.jsonl: rank 2's trace needs a file of its own" in said
    assert [*tmp_path.iterdir()] == [taken]
    taken.unlink()
    taken.mkdir()
    outcome = call(capsys, "run", "example", "--tp", "3", "--out", tmp_path / "r.jsonl")
    assert (outcome.code, "it is a folder" in outcome.err) == (2, True)


@pytest.mark.parametrize("rank", ["0", "2"])
def test_a_process_of_torchruns_records_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    path = tmp_path / "trace.jsonl"
    for name, value in {"MASTER_ADDR": "host", "MASTER_PORT": "1", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", rank)
    with record(path) as recorder:
        assert recorder.for_workers() is None  # torchrun has started them
    assert [*tmp_path.iterdir()] == [rank_path(path, int(rank))]


# -- a worker's recorder ---------------------------------------------------------------------------


def told(recorder: RankRecorder, oracle: Oracle) -> None:
    """Tell a recorder what a worker hears."""
    config = Config.create(oracle.folder, {"tensor_parallel_size": 3})
    model_config = ModelConfig.from_folder(oracle.folder)
    recorder.engine_init(config, model_config)
    recorder.tp_runtime_init(2, 3, "cpu", "gloo")
    recorder.step_start(1)
    ranges = [(0, 2)]
    prefill = PrefillInputs(
        input_ids=[1, 2, 3],
        positions=[0, 1, 2],
        slot_mapping=[0, 1, 2],
        position_ranges=ranges,
        slot_ranges=ranges,
        cu_seqlens_q=[0, 3],
        cu_seqlens_k=[0, 3],
        max_seqlen_q=3,
        max_seqlen_k=3,
        block_tables=None,
        context_lens=[3],
        logits_indices=[2],
    )
    recorder.prepare_prefill_tensors(prefill)
    recorder.run_eager("prefill", 3)
    recorder.step_start(2)
    recorder.prepare_decode_tensors(DecodeInputs([4], [3], [3], [4], [[0]]))
    recorder.run_eager("device_has_no_graphs", 1)
    recorder.step_start(3)
    recorder.prepare_prefill_tensors(prefill)
    recorder.run_eager("prefill", 3)
    recorder.step_start(4)
    recorder.prepare_decode_tensors(DecodeInputs([4], [3], [3], [4], [[0]]))
    recorder.cudagraph_replay(1, 1, is_ahead=False)


def test_a_workers_trace_says_who_it_is_and_what_it_did_in_each_step(oracle: Oracle) -> None:
    file = MemoryFile()
    with RankRecorder(Sink(file), rank=2, run_id="the run") as recorder:
        told(recorder, oracle)
        # Nothing waits for a next step that may never come.
        whole = [*read_trace(io.BytesIO(file.getvalue()))]
    records = [*read_trace(io.BytesIO(file.contents), warn=pytest.fail)]
    assert records[:-1] == whole
    header, *events, footer = records
    assert isinstance(header, Header)
    assert (header.rank, header.world_size, header.run_id) == (2, 3, "the run")
    assert footer == Footer(event_id=11, num_events=10, exit="ok")
    assert [(ev.tag_of(e), e.step, e.phase) for e in events if isinstance(e, ev.Event)] == [
        ("ENGINE_INIT", None, "bootstrap"),
        ("TP_RUNTIME_INIT", None, "init"),
        ("PREPARE_PREFILL_TENSORS", 1, "prefill"),
        ("RUN_EAGER", 1, "prefill"),
        ("PREPARE_DECODE_TENSORS", 2, "decode"),
        ("RUN_EAGER", 2, "decode"),
        ("PREPARE_PREFILL_TENSORS", 3, "prefill"),
        ("RUN_EAGER", 3, "prefill"),
        ("PREPARE_DECODE_TENSORS", 4, "decode"),
        ("CUDAGRAPH_REPLAY", 4, "decode"),
    ]


@pytest.mark.parametrize("existing", ["keep", "replace"])
def test_a_recipe_makes_the_recorder_of_any_rank(
    tmp_path: Path,
    oracle: Oracle,
    existing: Any,  # noqa: ANN401 - a literal
) -> None:
    old = tmp_path / "trace.rank2.jsonl"
    old.write_text("old", encoding="utf-8")
    recipe = RankRecipe(tmp_path / "trace.jsonl", "the run", (), existing)

    def work() -> None:
        with recipe(2) as recorder:
            told(recorder, oracle)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    header, *_, footer = read_trace(tmp_path / "trace.rank2.jsonl", warn=pytest.fail)
    assert isinstance(header, Header)
    assert header.run_id == "the run"
    assert isinstance(footer, Footer)
    assert footer.exit == "interrupted"
    is_kept = [file.read_text() for file in tmp_path.glob("*.1.*")] == ["old"]
    assert is_kept == (existing == "keep")


# -- reading them together -------------------------------------------------------------------------


def line(tag: str, **fields: object) -> bytes:
    """A line that no version knows but as an Unknown, unless it is a header or a footer."""
    return msgspec.json.encode({"event": tag, **fields}) + b"\n"


def header_line(rank: int, run_id: str = "the run", world_size: int = 2) -> bytes:
    header = Header(
        run_id=run_id,
        rank=rank,
        world_size=world_size,
        created="",
        clock={},
        engine={},
        environment={},
        model={},
        config={},
    )
    return msgspec.json.encode(header) + b"\n"


def run_line(event_id: int, step: int | None) -> bytes:
    event = ev.RunEager(
        event_id=event_id, ts_ns=0, step=step, phase="decode", reason="enforce_eager", num_tokens=1
    )
    return msgspec.json.encode(event) + b"\n"


def write(path: Path, rank: int, steps: list[int | None], **options: Any) -> None:  # noqa: ANN401 - header_line's
    lines = [run_line(number, step) for number, step in enumerate(steps, start=1)]
    footer = Footer(event_id=len(steps) + 1, num_events=len(steps), exit="ok")
    content = [header_line(rank, **options), *lines, msgspec.json.encode(footer) + b"\n"]
    rank_path(path, rank).write_bytes(b"".join(content))


def places(records: list[tuple[int, Record]]) -> list[tuple[int, int | None, int]]:
    return [(rank, r.step, r.event_id) for rank, r in records if isinstance(r, ev.Event)]


def test_ranks_are_merged_by_step_then_rank_then_event(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write(path, 0, [None, None, 1, 1, None, 2, None])
    write(path, 1, [None, 1, 1, 2, 2])
    records = list(read_ranks(path, warn=pytest.fail))
    assert places(records) == [
        *((0, None, 1), (0, None, 2), (1, None, 1)),  # before the first step
        *((0, 1, 3), (0, 1, 4), (1, 1, 2), (1, 1, 3)),
        (0, None, 5),  # between the two
        *((0, 2, 6), (1, 2, 4), (1, 2, 5)),
        (0, None, 7),  # after the last
    ]
    assert [type(r) for _, r in records[:2]] == [Header, Header]
    assert [(rank, type(r)) for rank, r in records[-2:]] == [(0, Footer), (1, Footer)]
    assert [r for rank, r in records if rank == 0] == list(read_trace(path))


def test_an_event_that_nobody_knows_stays_behind_its_neighbour(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write(path, 1, [1])
    strange = line("STRANGE", step=1)
    path.write_bytes(header_line(0) + run_line(1, 1) + strange + run_line(2, 2))
    kinds = [(rank, type(r)) for rank, r in read_ranks(path)]
    assert kinds == [
        *((0, Header), (1, Header), (0, ev.RunEager), (0, Unknown), (1, ev.RunEager)),
        *((0, ev.RunEager), (1, Footer)),
    ]


def test_a_rank_that_is_missing_or_of_another_run_is_left_out_with_a_warning(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.jsonl"
    write(path, 0, [1], world_size=4)
    write(path, 1, [1], run_id="an older run")
    write(path, 3, [1], world_size=4)
    warnings: list[str] = []
    records = list(read_ranks(path, warn=warnings.append))
    assert places(records) == [(0, 1, 1), (3, 1, 1)]
    assert [Path(w.split(" is ")[0]).name for w in warnings] == [
        *("trace.rank1.jsonl", "trace.rank2.jsonl")
    ]
    assert "of another run" in warnings[0]
    assert "missing: the run had 4 ranks" in warnings[1]


def test_a_trace_of_one_rank_and_any_other_ranks_are_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write(path, 0, [1], world_size=1)
    write(path, 1, [1, 2])
    assert places(list(read_ranks(path, warn=pytest.fail))) == [(0, 1, 1)]
    other = list(read_ranks(tmp_path / "trace.rank1.jsonl", warn=pytest.fail))
    assert places(other) == [(1, 1, 1), (1, 2, 2)]


def test_a_broken_trace_of_any_rank_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write(path, 0, [1])
    rank_path(path, 1).write_bytes(header_line(1) + b"nonsense\n" + run_line(1, 1))
    with pytest.raises(UnreadableTraceError, match=r"trace.rank1.jsonl: line 2"):
        list(read_ranks(path))


# -- the whole way: two processes, two traces, one replay ------------------------------------------


@pytest.fixture(scope="module")
def traced(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 0's trace of a run with two ranks."""
    path = tmp_path_factory.mktemp("run") / "trace.jsonl"
    before = worker_pids()
    asked = [*("--prompt", "w5 w6 w7", "--prompt", "w8", "--max-tokens", "4", "--tp", "2")]
    files = [*("--model", str(oracle.folder), "--out", str(path))]
    assert run_command(["run", "example", *asked, *files, "--quiet"]) == 0
    assert worker_pids() == before
    return path


def test_a_run_with_two_ranks_is_recorded_in_two_files(traced: Path) -> None:
    assert sorted(traced.parent.iterdir()) == [traced, rank_path(traced, 1)]
    records = list(read_ranks(traced, warn=pytest.fail))
    (_, first), (_, second) = records[:2]
    assert isinstance(first, Header)
    assert isinstance(second, Header)
    assert (first.rank, second.rank, first.world_size, second.world_size) == (0, 1, 2, 2)
    assert first.run_id == second.run_id
    assert [r.exit for _, r in records if isinstance(r, Footer)] == ["ok", "ok"]
    starts = [(rank, r) for rank, r in records if isinstance(r, ev.TpRuntimeInit)]
    assert [(rank, r.rank, r.world_size, r.backend) for rank, r in starts] == [
        *((0, 0, 2, "gloo"), (1, 1, 2, "gloo"))
    ]
    budgets = [r for _, r in records if isinstance(r, ev.KvBudgetEstimate)]
    assert len({budget.num_blocks for budget in budgets}) == 1
    assert [budget.num_local_ranks for budget in budgets] == [2, 2]
    ran = [(rank, r.step) for rank, r in records if isinstance(r, ev.RunEager)]
    assert ran == [(rank, step) for step in range(1, 5) for rank in (0, 1)]
    assert not {ev.tag_of(r) for rank, r in records if rank and isinstance(r, ev.Event)} & {
        *("SCHEDULE_PREFILL", "SCHEDULE_DECODE", "SAMPLE_TOKENS", "STEP_END", "STATE_TRANSITION")
    }


def test_a_replay_shows_the_ranks(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = call(capsys, "replay", traced, "--lang", "en")
    assert (shown.code, shown.err) == (0, "")
    assert "2 processes" in shown.out
    assert "on each of 2 ranks" in shown.out

    log = call(capsys, "replay", traced, "--view", "log", "--lang", "en").out.splitlines()
    marked = [text for text in log if text.startswith("rank=1 | ")]
    assert len(marked) == sum("rank=" in text[:5] for text in log)
    assert {text.split()[2] for text in marked} - {"allocate_kv_cache:", "decode"} == {
        *("TEACHING/ENGINE_INIT", "TEACHING/TP_RUNTIME_INIT", "TEACHING/MODEL_WEIGHTS_LOADED"),
        *("TEACHING/KV_BUDGET_ESTIMATE", "TEACHING/CUDAGRAPH_SKIP", "TEACHING/RUN_EAGER"),
        *("TEACHING/PREPARE_PREFILL_TENSORS", "TEACHING/PREPARE_DECODE_TENSORS"),
    }

    lines = call(capsys, "replay", traced, "--view", "log", "--json").out.splitlines()
    fields = [json.loads(text) for text in lines]
    assert [f["rank"] for f in fields if f["event"] == "TRACE_HEADER"] == [0, 1]
    ids = [f["event_id"] for f in fields if f.get("rank") == 1 and f["event"] != "TRACE_HEADER"]
    assert all(later == earlier + 1 for earlier, later in pairwise(ids))

    alone = call(capsys, "replay", rank_path(traced, 1), "--lang", "en")
    assert (alone.code, "rank 1's own trace" in alone.err) == (0, True)
    assert "rank 1 / 2" in alone.out
