"""Widths: every command on terminals of any width, and where the width is no width at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nvtrace import doctor
from nvtrace.reader import read_trace
from support.cli import call, misfits
from support.cli_traces import scaled, write_records

if TYPE_CHECKING:
    from pathlib import Path

LANGUAGES = ["en", "zh"]
WIDTHS = [*range(40, 51, 2), 57, 60, 63, 70, 77, 80, 100, 120]
COMMANDS = {
    "replay": ["replay", "{trace}", "--view", "steps"],
    "replay totals": ["replay", "{trace}", "--steps", "1"],
    "stats": ["stats", "{trace}"],
    "check": ["check", "{broken}", "--all"],
    "clean check": ["check", "{trace}"],
    "at": ["at", "{trace}", "9"],
    "explain": ["explain", "{trace}", "--seq", "2"],
    "explain step": ["explain", "{trace}", "--step", "9"],
    "diff": ["diff", "{trace}", "{other}"],
    "whatif": ["whatif", "{trace}", "--set", "num_kvcache_blocks=60", "--set", "policy=mixed"],
    "validate": ["validate", "{broken}"],
    "clean validate": ["validate", "{trace}"],
    "events": ["events"],
    "one event": ["events", "PREEMPT"],
    "doctor": ["doctor", "--no-cost"],
    "run --list": ["run", "--list"],
}
LINES = {  # an event, or a name and its value, is one line however long it is
    "tail": ["tail", "{trace}"],
    "log": ["replay", "{trace}", "--view", "log"],
    "replay --plain": ["replay", "{trace}", "--plain"],
    "stats --json": ["stats", "{trace}", "--json"],
    "events --json": ["events", "--json"],
    "export": ["export", "{trace}", "--to", "prometheus"],
    "schema": ["schema"],
    "help": ["--help"],
}
NO_WIDTHS = ["", "0", "-1", "abc", "1e3", "²", "1000000", "9" * 5000]
TOO_NARROW = ["1", "2", "5", "10", "19"]


@pytest.fixture(scope="module")
def names(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Traces: one with the numbers of a large run, a small one, and a broken one."""
    made = tmp_path_factory.mktemp("made")
    crowded = folder / "crowded.jsonl"
    large = write_records(made / "large.jsonl", scaled(read_trace(crowded)))
    lines = crowded.read_text("utf-8").splitlines(keepends=True)
    broken = [
        line.replace('"free_blocks":', '"free_blocks":1000') if index % 9 == 0 else line
        for index, line in enumerate(lines)
    ]
    broken[40] = '{"event":"STEP_END","event_id":"' + "1234567890" * 9 + '"}\n'
    (made / "broken.jsonl").write_text("".join(broken), encoding="utf-8")
    return {"trace": str(large), "other": str(crowded), "broken": str(made / "broken.jsonl")}


@pytest.fixture(autouse=True)
def _a_steady_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = doctor.examine_machine()  # its free memory is another at each look
    monkeypatch.setattr(doctor, "examine_machine", lambda: machine)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.delenv("COLUMNS", raising=False)


def filled(words: list[str], names: dict[str, str], lang: str | None = None) -> list[str]:
    """The command line; a command without words of its own has no --lang."""
    return [*(word.format(**names) for word in words), *(["--lang", lang] if lang else [])]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_number_is_cut_and_no_row_is_too_wide(
    command: str,
    lang: str,
    names: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = filled(COMMANDS[command], names, lang)
    monkeypatch.setenv("COLUMNS", "400")
    wide = call(capsys, *words).out
    assert wide
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        assert misfits(call(capsys, *words).out, wide, width) == [], f"{width} columns"


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_whole_replay_fits(
    lang: str,
    names: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        out = call(capsys, "replay", names["trace"], "--lang", lang).out
        assert misfits(out, out, width) == [], f"{width} columns"


@pytest.mark.parametrize("command", [*COMMANDS, *LINES])
def test_a_size_that_no_terminal_has_is_unset_and_a_tiny_one_loses_nothing(
    command: str,
    names: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = filled({**COMMANDS, **LINES}[command], names)
    unset = call(capsys, *words)
    assert len(unset.out) > 20
    is_first = command == "stats"  # sizes are read in one place: one command tries them all
    for size in NO_WIDTHS if is_first else ["0", "9" * 5000]:
        monkeypatch.setenv("COLUMNS", size)
        monkeypatch.setenv("LINES", size)
        assert call(capsys, *words) == unset, f"COLUMNS={size[:9]}"
    monkeypatch.delenv("LINES")
    monkeypatch.setenv("COLUMNS", "40")
    narrow = call(capsys, *words)
    for size in TOO_NARROW if is_first else ["1", "19"]:
        monkeypatch.setenv("COLUMNS", size)
        assert call(capsys, *words) == narrow, f"COLUMNS={size}"


def test_both_sides_of_a_comparison_are_shown_at_any_width(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = filled(COMMANDS["diff"], names, "en")
    wide = call(capsys, *words).out.partition("The first decision")[2].partition("Latencies")[0]
    told = {word for word in wide.split() if not word.startswith("─")}
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        assert told <= {*call(capsys, *words).out.split()}, f"{width} columns"


def test_columns_leave_in_their_order_and_are_named(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order = ["tokens", "run", "seqs", "free", "wait", "time", "phase"]
    counts = []
    for width in range(100, 39, -3):
        monkeypatch.setenv("COLUMNS", str(width))
        out = call(capsys, "replay", names["trace"], "--view", "steps", "--lang", "en").out
        [heading] = [line.split() for line in out.splitlines() if line.lstrip().startswith("step ")]
        gone = [name for name in order if name not in heading]
        assert gone == order[: len(gone)]
        said = " ".join(out.partition("too narrow to show: ")[2].split())
        assert {*said.split(", ")} == ({*gone} or {""})
        counts.append(len(gone))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 6)
