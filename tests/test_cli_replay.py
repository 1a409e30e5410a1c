"""nvtrace replay: what it shows of a trace, and what it says of one that is none."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import subprocess
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from rich.cells import cell_len

from nvtrace import events as ev
from nvtrace.catalog import load_catalog
from nvtrace.reader import read_trace
from nvtrace_cli.views.step_table import PLAIN_COLUMNS
from support.cli import ROOT, Outcome, call, command, environment, spawn
from support.cli_traces import article_run, write_trace

if TYPE_CHECKING:
    from pathlib import Path

LANGUAGES = ("en", "zh")


pytestmark = pytest.mark.usefixtures("eighty_columns")


def plain_rows(outcome: Outcome) -> list[dict[str, str]]:
    """The rows of a --plain table."""
    head, *lines = outcome.out.splitlines()
    return [dict(zip(head.split("\t"), line.split("\t"), strict=True)) for line in lines]


# -- what is no trace ------------------------------------------------------------------------------


def assert_refused(outcome: Outcome, code: int, said: str) -> None:
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith("nvtrace: ")
    assert outcome.err.count("\n") == 1
    assert said in outcome.err


def test_no_file_is_one_line_and_code_3(tmp_path: Path) -> None:
    assert_refused(spawn("replay", tmp_path / "none.jsonl"), 3, "none.jsonl")


def test_a_folder_is_one_line_and_code_3(tmp_path: Path) -> None:
    assert_refused(spawn("replay", tmp_path), 3, "folder")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"Dear diary,\nnothing happened.\n", "not an nvtrace trace"),
        (b'{"event":"SOMETHING_ELSE"}\n', "not an nvtrace trace"),
        (b"\x80\x81\x82\n", "not an nvtrace trace"),
    ],
)
def test_what_is_no_trace_is_one_line_and_code_3(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(content)
    assert_refused(call(capsys, "replay", tmp_path / "file"), 3, said)
    assert_refused(call(capsys, "replay", tmp_path / "file", "--view", "log"), 3, said)


def test_a_broken_line_in_the_middle_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (folder / "article.jsonl").read_bytes().splitlines(keepends=True)
    lines[19] = b'{"event":"STEP_END","oops\n'
    (tmp_path / "broken.jsonl").write_bytes(b"".join(lines))
    assert_refused(call(capsys, "replay", tmp_path / "broken.jsonl"), 3, "line 20")


def test_an_event_that_cannot_follow_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (folder / "article.jsonl").read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'"REQUEST_ENQUEUE"' not in line]
    (tmp_path / "torn.jsonl").write_bytes(b"".join(kept))
    assert_refused(call(capsys, "replay", tmp_path / "torn.jsonl"), 3, "torn.jsonl: event")


def test_an_output_of_nobodys_request_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "article.jsonl").read_text("utf-8")
    torn = re.sub(r'("REQUEST_OUTPUT".*?"seq_id":)1', r"\g<1>7", text)
    (tmp_path / "torn.jsonl").write_text(torn, "utf-8")
    outcome = call(capsys, "replay", tmp_path / "torn.jsonl")
    assert outcome.code == 3
    assert "request 7" in outcome.err
    assert "step 1" in outcome.out  # what came before is shown


@pytest.mark.parametrize("options", [(), ("--plain",), ("--json",), ("--view", "steps")])
def test_a_trace_that_contradicts_itself_is_shown_up_to_there(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    broken = ROOT / "docs" / "exercises" / "02-the-longer-it-runs-the-fewer-fit.jsonl.zst"
    outcome = call(capsys, "replay", broken, *options)
    assert outcome.code == 3
    assert re.search(r"event \d+ \(BLOCKS_RELEASE\) does not follow", outcome.err)
    assert "prefill" in outcome.out


def test_a_newer_trace_is_one_line_and_code_4(folder: Path) -> None:
    newer = (folder / "article.jsonl").read_bytes().replace(b'"version":[1,0]', b'"version":[2,3]')
    assert_refused(spawn("replay", "-", stdin=newer), 4, "2.3")


def test_a_cut_last_line_is_a_warning_and_the_rest_is_shown(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "article.jsonl").read_bytes()
    in_a_step = whole.index(b'"SAMPLE_TOKENS"', len(whole) // 2)
    (tmp_path / "cut.jsonl").write_bytes(whole[: in_a_step + 20])
    outcome = spawn("replay", tmp_path / "cut.jsonl")
    assert outcome.code == 0
    assert outcome.err.startswith("nvtrace: warning: ")
    assert outcome.err.count("\n") == 1
    assert "unfinished" in outcome.out
    last = plain_rows(spawn("replay", tmp_path / "cut.jsonl", "--plain"))[-1]
    assert last["key_event"] == "the trace ends within this step"
    assert last["wall_ms"] == ""


def test_a_trace_of_a_killed_start_has_no_step_to_show(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (folder / "article.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "start.jsonl").write_bytes(b"".join(lines[:3]))
    outcome = call(capsys, "replay", tmp_path / "start.jsonl")
    assert outcome.code == 0
    assert "no step" in outcome.out
    assert call(capsys, "replay", tmp_path / "start.jsonl", "--json").out == ""


# -- the whole picture -----------------------------------------------------------------------------


def test_the_header_spells_out_the_model_and_the_sum_behind_the_blocks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = call(capsys, "replay", folder / "article.jsonl").out
    assert "Qwen3-0.6B · Qwen3ForCausalLM" in out
    assert "28 layers, hidden 1024, 16 heads, 8 KV heads · 596 M parameters" in out
    assert "2 (K, V) × 28 layers × 256 tokens × 8 heads × 128 × 2 B = 28 MiB" in out  # noqa: RUF001 - a times sign
    assert "0.90 × 16 GiB - 6 GiB in use = 8.40 GiB, at most 2 GiB" in out  # noqa: RUF001 - the same
    assert "2 GiB / 28 MiB = 73 blocks = 18,688 tokens" in out
    assert "2026-01-02 03:04:05 UTC" in out


def test_blocks_that_were_given_are_called_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = call(capsys, "replay", folder / "crowded.jsonl").out
    assert "20 (num_kvcache_blocks) = 80 tokens = 8.75 MiB" in out
    assert "in use" not in out


def test_the_steps_of_the_article_fold_as_in_the_article(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = call(capsys, "replay", folder / "article.jsonl", "--view", "steps").out
    steps = re.findall(r"^ *(\d+(?: - \d+)?) (?:prefill|decode)", out, re.MULTILINE)
    assert steps == ["1", "2 - 147", "148", "149", "150 - 255", "256"]
    assert "2 prompts computed" in out
    assert "seq 0 ends: max_tokens" in out
    assert "batch 2 -> 1" in out


def test_unfold_gives_every_step_its_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = call(capsys, "replay", folder / "article.jsonl", "--plain", "--unfold")
    rows = plain_rows(outcome)
    assert [row["first_step"] for row in rows] == [str(step) for step in range(1, 257)]
    assert all(row["first_step"] == row["last_step"] for row in rows)


def test_the_timeline_draws_the_articles_shape(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = call(capsys, "replay", folder / "article.jsonl", "--view", "timeline").out.splitlines()
    by_label = {line.split("  ")[0].strip(): line for line in lines}
    assert "steps 1 to 256, one column = 4 steps" in lines[0]
    assert by_label["seq 0"].rstrip() == "seq 0  █" + "━" * 35 + "●"
    assert by_label["seq 1"].rstrip() == "seq 1  █" + "━" * 62 + "●"
    assert by_label["batch"].rstrip() == "batch  " + "█" * 37 + "▄" * 27
    assert by_label["step"].split() == ["step", "1", "50", "100", "150", "200", "250"]


def test_the_timeline_shows_waiting_and_preemption(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = call(capsys, "replay", folder / "crowded.jsonl", "--view", "timeline").out
    assert "seq 3  █━━━━━━━━━x·············█━━━━━━━━━━━━●\n" in out
    assert "· waiting   █ prefill   ━ decode   x preempted   ● ended" in out


def test_the_timeline_shows_who_sits_out_and_who_is_aborted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = call(capsys, "replay", folder / "chunked.jsonl", "--view", "timeline").out
    assert "seq 0  " + "   ".join("██╌╌╌╌╌╌━╌━━━━━━●") in out  # one mark a step
    assert "seq 3  " + " " * 36 + "█   ━   ━   ●" in out
    assert "╌ running, not in the batch" in out


def test_the_key_events_tell_the_story_of_a_preemption(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = plain_rows(call(capsys, "replay", folder / "crowded.jsonl", "--plain"))
    story = {row["first_step"]: row["key_event"] for row in rows}
    assert story["11"].startswith(
        "seq 3 preempted for seq 0: blocks freed 5, up to 20 tokens to recompute"
    )
    assert story["12"].startswith("seq 3 waits: blocks needed 6, free 2")
    assert story["15"].startswith("seq 2 preempts itself")
    assert "seq 2: 8 of 25 tokens cached; seqs 2, 3 recomputed" in story["25"]


def test_the_key_events_tell_the_story_of_chunks_arrivals_and_aborts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = plain_rows(call(capsys, "replay", folder / "chunked.jsonl", "--plain"))
    story = {(row["first_step"], row["last_step"]): row["key_event"] for row in rows}
    assert story["1", "1"].startswith("seq 0: tokens 0-7 of 11; seq 1 waits: only the first")
    assert story["4", "6"].startswith("seq 1: tokens 8-31 of 37; seq 2 waits: tokens needed 5")
    assert story["7", "7"].startswith("seq 1: tokens 32-36, the last of 37")
    assert story["10", "10"].startswith("seq 3 arrives; seq 3: prompt computed")
    assert story["13", "13"].startswith("seq 3 aborted; batch 4 -> 3")


def test_the_totals_add_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "replay", folder / "article.jsonl").out
    totals = out[out.index("Totals") :]
    assert "256 = 1 prefill + 255 decode" in totals
    assert "28 in (0 from the prefix cache), 404 out" in totals
    assert "1.54 s in steps = prefill 772 ms + decode 770 ms" in totals
    assert "262 tokens/s" in totals
    assert re.search(r"0 +11 +0 +148/148 +step 1, .* max_tokens, step 148", totals)


def test_nothing_from_a_trace_reaches_the_terminal_unescaped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "/models/[red]x[/red]\x1b[2J\x07\u202e"
    write_trace(tmp_path / "hostile.jsonl", article_run(), model=hostile)
    for trace in (folder / "article.jsonl", tmp_path / "hostile.jsonl"):
        for view in ("all", "log"):
            out = call(capsys, "replay", trace, "--view", view).out
            assert not set(out) & set("\x1b\x07\u202e\t")
    out = call(capsys, "replay", tmp_path / "hostile.jsonl").out
    assert r"x[/red]\x1b[2J\x07\u202e" not in out  # the last part of the path only
    assert r"red]\x1b[2J\x07\u202e" in out
    assert r'"[bold red]no markup[/] \x1b[2J\x07 \u202e wide: 质数\nnext line\ttab"' in out


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("name", ["article", "crowded", "chunked"])
def test_no_line_is_wider_than_the_terminal_in_any_language(
    name: str,
    lang: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        out = call(capsys, "replay", folder / f"{name}.jsonl", "--lang", lang).out
        assert max(map(cell_len, out.splitlines())) <= width
        assert "…" not in out  # nothing is cut off


@pytest.mark.parametrize("lang", LANGUAGES)
def test_columns_align_under_their_headings(
    lang: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = call(capsys, "replay", folder / "crowded.jsonl", "--view", "steps", "--lang", lang).out
    lines = out.splitlines()
    [rule] = [index for index, line in enumerate(lines) if line.startswith("──")]
    heading = load_catalog("zh" if lang == "zh" else "en").ui("column_event")
    start = cell_len(lines[rule - 1].split(heading)[0])
    [key] = [index for index, line in enumerate(lines) if "~" in line and index > rule][-1:]
    for line in lines[rule + 1 : key]:
        cells, column = [], 0
        for character in line:
            cells.append((column, character))
            column += cell_len(character)
        assert (start - 1, " ") in cells  # a gap in front of the words, in every line


def test_the_frame_of_the_header_is_straight(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = call(capsys, "replay", folder / "article.jsonl", "--lang", "zh").out
    panel = [line for line in out.splitlines() if line[:1] in {"╭", "│", "╰"}]
    assert len(panel) > 8
    assert {cell_len(line) for line in panel} == {80}


def test_a_terminal_that_knows_ascii_only_gets_ascii_glyphs(folder: Path) -> None:
    out = spawn("replay", folder / "crowded.jsonl", PYTHONIOENCODING="ascii", PYTHONUTF8="0").out
    assert "seq 3  #=========x.............#============o" in out
    assert out.isascii()


# -- a part of it ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "first", "last"),
    [("100..150", 100, 150), ("250..", 250, 256), ("..9", 1, 9), ("17", 17, 17)],
)
def test_steps_picks_steps(
    steps: str, first: int, last: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "replay", folder / "article.jsonl", "--json", "--steps", steps)
    indexes = [json.loads(line)["engine_step"] for line in outcome.out.splitlines()]
    assert indexes == list(range(first, last + 1))
    out = call(
        capsys, "replay", folder / "article.jsonl", "--view", "timeline", "--steps", steps
    ).out
    assert f"steps {first} to {last}" in out


def test_seq_picks_a_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = folder / "crowded.jsonl"
    timeline = call(capsys, "replay", trace, "--view", "timeline", "--seq", "2").out
    assert "seq 2" in timeline
    assert "seq 3" not in timeline
    steps = [
        json.loads(line)
        for line in call(capsys, "replay", trace, "--json", "--seq", "3").out.splitlines()
    ]
    indexes = [step["engine_step"] for step in steps]
    assert indexes[:11] == list(range(1, 12))  # until it is preempted
    assert 20 not in indexes
    log = call(capsys, "replay", trace, "--view", "log", "--seq", "3").out
    assert "seq_id=3, for_seq_id=0" in log
    assert "seq_id=1" not in log


def test_seq_may_be_repeated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = folder / "crowded.jsonl"
    out = call(capsys, "replay", trace, "--view", "timeline", "--seq", "3", "--seq", "0").out
    assert re.findall(r"^seq \d", out, re.MULTILINE) == ["seq 0", "seq 3"]


def test_event_picks_from_the_log_whatever_its_case(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = call(capsys, "replay", folder / "crowded.jsonl", "--event", "schedule_*").out
    kinds = {line.split(" ")[0] for line in out.splitlines()}
    assert kinds == {"TEACHING/SCHEDULE_PREFILL", "TEACHING/SCHEDULE_DECODE"}


def test_event_picks_steps_in_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--event", "PREEMPT", "--view", "steps", "--plain")
    rows = plain_rows(call(capsys, "replay", folder / "crowded.jsonl", *arguments))
    assert [row["first_step"] for row in rows] == ["11", "15"]


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("--steps", "900..", "steps 1 to 38"), ("--seq", "9", "requests 0 to 3")],
)
def test_what_the_trace_does_not_have_is_said(
    option: str, value: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "replay", folder / "crowded.jsonl", option, value)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err


# -- for other programs ----------------------------------------------------------------------------


def test_json_has_an_object_for_every_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = call(capsys, "replay", folder / "crowded.jsonl", "--json").out
    steps = [json.loads(line) for line in out.splitlines()]
    assert [step["engine_step"] for step in steps] == list(range(1, 39))
    assert steps[0]["admitted"] == [0, 1, 2, 3]
    assert steps[10]["preempted"] == [{"seq_id": 3, "for_seq_id": 0}]
    assert steps[10]["waiting"] == [3]
    assert steps[11]["admission_stop"] == {"seq_id": 3, "reason": "no_blocks", "need": 6, "have": 2}
    assert steps[23]["finished"] == [
        {"seq_id": 0, "reason": "max_tokens"},
        {"seq_id": 1, "reason": "max_tokens"},
    ]
    assert {step["wall_ns"] for step in steps if step["phase"] == "decode"} == {3_020_000}


def test_plain_is_a_table_with_tabs_and_a_heading(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "replay", folder / "article.jsonl", "--plain")
    assert outcome.out.splitlines()[0].split("\t") == list(PLAIN_COLUMNS)
    rows = plain_rows(outcome)
    assert [(row["first_step"], row["last_step"]) for row in rows][1] == ("2", "147")
    assert rows[1]["wall_ms"] == "3.020"
    assert "\u00a0" not in outcome.out


def test_the_log_as_json_is_the_trace_itself(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = folder / "article.jsonl"
    out = call(capsys, "replay", trace, "--view", "log", "--json").out
    assert out.encode() == trace.read_bytes()


def test_unknown_events_of_a_newer_minor_version_are_shown_as_they_came(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (folder / "article.jsonl").read_bytes().splitlines(keepends=True)
    lines.insert(5, b'{"event":"SPECULATE","event_id":5,"num_drafts":3}\n')
    (tmp_path / "newer.jsonl").write_bytes(b"".join(lines))
    outcome = call(capsys, "replay", tmp_path / "newer.jsonl", "--view", "log")
    assert "TEACHING/SPECULATE | stats={event_id=5, num_drafts=3}\n" in outcome.out
    assert "SPECULATE x 1" in outcome.err
    assert "2 - 147" in call(capsys, "replay", tmp_path / "newer.jsonl").out


def test_stdin_and_compressed_traces_are_read(folder: Path, tmp_path: Path) -> None:
    content = (folder / "article.jsonl").read_bytes()
    (tmp_path / "article.jsonl.gz").write_bytes(gzip.compress(content))
    from_file = spawn("replay", folder / "article.jsonl", "--plain")
    assert spawn("replay", "-", "--plain", stdin=content) == from_file
    assert spawn("replay", tmp_path / "article.jsonl.gz", "--plain") == from_file
    assert from_file.code == 0


# -- on a terminal ---------------------------------------------------------------------------------


def on_a_terminal(*arguments: str | Path, **changes: str) -> tuple[int, str]:
    """Run a command whose stdout is a terminal. Returns its code and what it wrote."""
    ours, theirs = pty.openpty()
    variables = environment(TERM="xterm-256color", LINES="24", **changes)
    process = subprocess.Popen(command(*arguments), stdout=theirs, env=variables)
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux says so when the other end is closed
            break
        if not part:
            break
        written += part
    os.close(ours)
    return process.wait(timeout=60), written.decode()


def test_a_terminal_gets_colours_unless_no_color_is_set(folder: Path) -> None:
    code, coloured = on_a_terminal("replay", folder / "article.jsonl")
    assert code == 0
    assert "\x1b[32m" in coloured  # decode is green
    code, colourless = on_a_terminal("replay", folder / "article.jsonl", NO_COLOR="1")
    assert code == 0
    assert "\x1b[32m" not in colourless
    assert "2 - 147" in colourless


@pytest.mark.parametrize("view", ["all", "timeline", "steps", "log"])
def test_playing_ends_with_the_whole_picture(view: str, folder: Path) -> None:
    trace = folder / "crowded.jsonl"
    code, written = on_a_terminal("replay", trace, "--view", view, "--speed", "max")
    assert code == 0
    assert ("\x1b[2K" in written) == (view != "log")  # frames replaced each other
    still = on_a_terminal("replay", trace, "--view", view)[1]
    assert still.strip().splitlines()[-1] in written


def test_off_a_terminal_nothing_is_played(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sleep(_seconds: float) -> None:
        raise AssertionError("it slept")

    monkeypatch.setattr("time.sleep", sleep)
    for view in ("all", "log"):
        still = call(capsys, "replay", folder / "crowded.jsonl", "--view", view)
        played = call(
            capsys, "replay", folder / "crowded.jsonl", "--view", view, "--speed", "0.001x"
        )
        assert played == still


def test_every_log_line_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "replay", folder / "article.jsonl", "--view", "log").out
    kinds = Counter(type(record) for record in read_trace(folder / "article.jsonl"))
    with_a_second_line = kinds[ev.KvBudgetEstimate] + kinds[ev.PrepareDecodeTensors]
    assert len(out.splitlines()) == kinds.total() - 2 + with_a_second_line
