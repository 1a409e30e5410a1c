"""nvtrace run: answers, messages, traces, and every way to fail; on a tiny random Qwen3."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from typing_extensions import override

from nanovllm.assets import TINY_QWEN3
from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.utils.model_config import ModelConfig
from nvtrace import events as ev
from nvtrace import pipeline, recorder
from nvtrace.catalog import load_catalog
from nvtrace.envelope import Footer
from nvtrace.progress import Progress
from nvtrace.reader import read_trace
from nvtrace.scenarios import SCENARIOS
from nvtrace_cli.export import Format
from nvtrace_cli.run import recording, stopping_between_steps
from nvtrace_cli.views.answers import escape_lines
from nvtrace_cli.views.console import THEME, UNICODE
from nvtrace_cli.views.live import LiveReporter, progress_view, reporting
from support.cli import call, command, environment, spawn
from support.oracle import Oracle, save_tokenizer
from support.recording import BUSY, Recording

if TYPE_CHECKING:
    from nvtrace.catalog import Language

ASKED = ("--prompt", "w5 w6 w7", "--prompt", "w8")
GREEDY = ("--temperature", "0")


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """A model whose words are w0, <end>, w2, w3 ...; w127, which ends a text, hardly ever comes."""
    oracle = Oracle.create(tmp_path_factory.mktemp("model"), {"eos_token_id": 127})
    save_tokenizer(oracle.folder, eos="w127")
    return oracle


@pytest.fixture(autouse=True)
def _in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")


def run_arguments(oracle: Oracle, *more: str) -> list[str]:
    return ["run", "example", "--model", str(oracle.folder), *ASKED, *GREEDY, *more]


def text_of(token_ids: list[int]) -> str:
    words = {1: "<end>"}
    return " ".join(
        words.get(token_id, f"w{token_id}") for token_id in token_ids if token_id != 127
    )


# -- what goes in ----------------------------------------------------------------------------------


@pytest.fixture
def thinker(oracle: Oracle, tmp_path: Path) -> Path:
    """The model, with a template that lets it think unless it is told not to."""
    folder = shutil.copytree(oracle.folder, tmp_path / "thinker")
    template = "{{ messages[0].content }} {{ 'w3' if enable_thinking is false else 'w2' }}"
    (folder / "chat_template.jinja").write_text(template + " {{ colour }}", encoding="utf-8")
    return folder


NO_THINKING = '{"enable_thinking": false}'


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), [5, 2]),
        (("--enable-thinking",), [5, 2]),
        (("--no-enable-thinking",), [5, 3]),
        (("--chat-template-kwargs", NO_THINKING), [5, 3]),
        (("--chat-template-kwargs", NO_THINKING, "--no-enable-thinking"), [5, 3]),
        (("--chat-template-kwargs", '{"colour": "w9"}', "--no-enable-thinking"), [5, 3, 9]),
        (("--chat-template-kwargs", "{}"), [5, 2]),
        (("--chat-template-kwargs", '{"tokenize": true, "message": 1}'), [5, 2]),
    ],
)
def test_switches_reach_the_chat_template(
    options: tuple[str, ...], expected: list[int], thinker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--prompt", "w5", "--max-tokens", "1", *options)
    assert call(capsys, "run", "example", "--model", thinker, *asked).code == 0
    [request] = [e for e in read_trace("trace.jsonl") if isinstance(e, ev.RequestEnqueue)]
    assert request.prompt_token_ids == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{enable_thinking: false}", "double quotes"),
        ("", "Expecting value"),
        ("[1]", "that is a list"),
        ("null", "that is a NoneType"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_switches_that_are_no_json_object_are_told_how_to_be_written(
    text: str, problem: str, thinker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("run", "example", "--model", thinker, "--chat-template-kwargs", text)
    outcome = call(capsys, *asked)
    assert (outcome.code, outcome.out, files_here()) == (2, "", {})
    assert problem in outcome.err
    assert f"such as --chat-template-kwargs '{NO_THINKING}'" in outcome.err


def test_switches_that_contradict_each_other_are_refused(
    thinker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--chat-template-kwargs", NO_THINKING, "--enable-thinking")
    outcome = call(capsys, "run", "example", "--model", thinker, *asked)
    assert (outcome.code, outcome.out) == (2, "")
    assert "give only one of the two" in outcome.err


def test_a_switch_of_the_engine_itself_is_refused_by_name(
    thinker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--chat-template-kwargs", '{"conversation": []}')
    outcome = call(capsys, "run", "example", "--model", thinker, *asked)
    assert (outcome.code, outcome.out) == (5, "")
    assert "'conversation'" in outcome.err
    assert "chat_template_kwargs" in outcome.err


# -- what comes out --------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["0", "1", "5", "19", "-1", "abc", "1000000"])
def test_answers_are_whole_whatever_the_size_of_the_terminal(
    columns: str,
    oracle: Oracle,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", columns)
    outcome = call(capsys, *run_arguments(oracle, "--max-tokens", "6"))
    assert outcome.code == 0
    for prompt in ([5, 6, 7], [8]):
        assert text_of(oracle.greedy(prompt, 6)) in outcome.out.splitlines()


def test_a_run_prints_its_answers_and_leaves_a_trace(
    oracle: Oracle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, *run_arguments(oracle, "--max-tokens", "6"))
    assert outcome.code == 0
    first, second = oracle.greedy([5, 6, 7], 6), oracle.greedy([8], 6)
    assert outcome.out.startswith("seq 0  w5 w6 w7  3 tokens in, ")
    assert f"\n{text_of(first)}\n\nseq 1  w8  1 tokens in, " in outcome.out
    assert outcome.out.endswith(f"\n{text_of(second)}\n")
    records = list(read_trace(tmp_path / "trace.jsonl"))
    assert isinstance(records[-1], Footer)
    assert records[-1].exit == "ok"


def test_a_run_off_a_terminal_tells_its_moments_line_by_line(
    oracle: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, *run_arguments(oracle, "--max-tokens", "60"))
    lines = outcome.err.splitlines()
    assert lines[0].startswith("the engine is ready, with ")
    assert lines[1].startswith("seq 0 joins the waiting queue: 3 tokens of prompt, at most 60")
    assert "step 1: seq 1 WAITING -> RUNNING, admitted" in outcome.err
    assert any(line.startswith("step 50 (decode)   ") for line in lines)
    assert "RUNNING -> FINISHED" in outcome.err
    assert lines[-1] == "nvtrace: the trace is in trace.jsonl; next: nvtrace replay trace.jsonl"
    assert len(lines) < 20
    assert "\x1b" not in outcome.err


def test_json_has_every_fact_of_every_answer(
    oracle: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, *run_arguments(oracle, "--max-tokens", "6", "--json"))
    value = json.loads(outcome.out)
    assert (value["scenario"], value["trace"]) == ("example", "trace.jsonl")
    assert [output["message"] for output in value["outputs"]] == ["w5 w6 w7", "w8"]
    assert [output["token_ids"] for output in value["outputs"]] == [
        oracle.greedy([5, 6, 7], 6),
        oracle.greedy([8], 6),
    ]
    assert value["outputs"][0]["finish_reason"] in {"stop", "length"}


def test_quiet_says_the_answers_and_nothing_else(
    oracle: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, *run_arguments(oracle, "--max-tokens", "6", "--quiet"))
    answers = [text_of(oracle.greedy(prompt, 6)) for prompt in ([5, 6, 7], [8])]
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == "\n".join(answers) + "\n"


def test_the_trace_of_a_run_is_replayed(oracle: Oracle, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, *run_arguments(oracle, "--max-tokens", "6", "--out", "t.jsonl.zst", "--quiet"))
    outcome = call(capsys, "replay", "t.jsonl.zst")
    assert outcome.code == 0
    assert outcome.err == ""
    assert "2 prompts computed" in outcome.out
    assert oracle.folder.name in outcome.out


def test_the_seed_decides_what_is_drawn(oracle: Oracle, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(seed: str) -> str:
        arguments = ("run", "example", "--model", oracle.folder, "--prompt", "w5", "--quiet")
        return call(
            capsys, *arguments, "--temperature", "9", "--max-tokens", "8", "--seed", seed
        ).out

    assert answer("1") == answer("1")
    assert answer("1") != answer("2")


def test_an_older_trace_is_kept_and_its_new_name_is_said(
    oracle: Oracle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.jsonl").write_text("precious")
    outcome = call(capsys, *run_arguments(oracle, "--max-tokens", "2"))
    assert (tmp_path / "trace.1.jsonl").read_text() == "precious"
    assert "trace.jsonl already existed: it is now trace.1.jsonl" in outcome.err


def test_list_names_every_scenario_with_its_story(capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "run", "--list").out
    for name in SCENARIOS:
        title, story = load_catalog("en").scenario(name)
        assert f"{name}  {title}\n" in out
        assert story in " ".join(out.split())


def test_list_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    value = json.loads(call(capsys, "run", "--list", "--json").out)
    assert [scenario["name"] for scenario in value] == list(SCENARIOS)
    for scenario in value:
        title, story = load_catalog("en").scenario(scenario["name"])
        assert (scenario["title"], scenario["story"]) == (title, story)


def test_the_next_command_can_be_pasted_whatever_the_trace_is_called(
    oracle: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, *run_arguments(oracle, "--max-tokens", "2", "--out", "my trace;.jsonl"))
    assert outcome.err.endswith("next: nvtrace replay 'my trace;.jsonl'\n")


def test_a_home_folder_is_found(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(oracle.folder.parent))
    arguments = ("--model", f"~/{oracle.folder.name}", "--prompt", "w5", "--max-tokens", "2")
    assert call(capsys, "run", "example", *arguments).code == 0


def test_more_tokens_are_offered_only_where_max_tokens_was_the_end(
    oracle: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    hint = "--max-tokens N for more"
    assert call(capsys, *run_arguments(oracle, "--max-tokens", "2")).err.count(hint) == 2
    full = call(capsys, *run_arguments(oracle, "--max-tokens", "99999"))
    assert "max_model_len" in full.out
    assert hint not in full.err


def test_a_run_whose_stderr_nobody_reads_comes_to_its_end(oracle: Oracle, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(*run_arguments(oracle, "--max-tokens", "60")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=tmp_path,
    )
    assert process.stderr is not None
    process.stderr.close()  # before the first line comes
    assert process.stdout is not None
    with process.stdout:
        assert text_of(oracle.greedy([8], 60)) in process.stdout.read()
    assert process.wait(timeout=60) == 0
    last = list(read_trace(tmp_path / "trace.jsonl"))[-1]
    assert isinstance(last, Footer)
    assert last.exit == "ok"


def test_the_moving_picture_on_a_terminal_that_went_away_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class GoneTerminal(io.StringIO):
        num_tries = 0

        @override
        def isatty(self) -> bool:
            return True

        @override
        def write(self, _text: str) -> int:
            self.num_tries += 1
            raise BrokenPipeError

    stream = GoneTerminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with reporting(load_catalog("en"), is_quiet=False) as report:
        assert isinstance(report, LiveReporter)
        report([step_end(1)])
        report([step_end(2)])
    assert report.progress.step == 2
    assert stream.num_tries == 1


def test_control_characters_of_an_answer_are_escaped_but_its_lines_are_kept() -> None:
    assert escape_lines("<think>\nok \x1b[2J\r\n</think>") == "<think>\nok \\x1b[2J\\r\n</think>"


# -- what goes wrong -------------------------------------------------------------------------------


def failure(outcome_err: str) -> str:
    """The last line of stderr: the one that says why."""
    return outcome_err.splitlines()[-1]


def test_a_model_folder_that_is_none_is_one_line_and_moves_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.jsonl").write_text("precious")
    (tmp_path / "empty").mkdir()
    for model in ("nowhere", "empty", "trace.jsonl"):
        outcome = call(capsys, "run", "example", "--model", model)
        assert (outcome.code, outcome.out) == (5, "")
        assert outcome.err.count("\n") == 1
        assert model in outcome.err
    assert (tmp_path / "trace.jsonl").read_text() == "precious"


def test_a_model_without_weights_is_one_line_and_moves_no_trace(
    oracle: Oracle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.jsonl").write_text("precious")
    (tmp_path / "hollow").mkdir()
    config = (oracle.folder / "config.json").read_bytes()
    (tmp_path / "hollow" / "config.json").write_bytes(config)
    outcome = call(capsys, "run", "example", "--model", tmp_path / "hollow")
    assert (outcome.code, outcome.out) == (5, "")
    assert outcome.err.count("\n") == 1
    assert "hollow" in outcome.err
    assert files_here() == {"trace.jsonl": "precious"}


def files_here() -> dict[str, str]:
    """The files of the current folder, and what they hold."""
    return {file.name: file.read_text() for file in Path.cwd().iterdir() if file.is_file()}


def test_prompts_that_are_all_longer_than_max_model_len_are_one_line_and_move_no_trace(
    oracle: Oracle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.jsonl").write_text("precious")
    prompts = [" ".join(["w5"] * length) for length in (600, 512)]
    for count, said in ((1, "the prompt has 600"), (2, "the shortest prompt has 512")):
        asked = [part for prompt in prompts[:count] for part in ("--prompt", prompt)]
        outcome = call(capsys, "run", "example", "--model", oracle.folder, *asked)
        assert (outcome.code, outcome.out) == (5, "")
        assert outcome.err.startswith(f"nvtrace: {said} tokens, but max_model_len=512 bounds")
        assert outcome.err.count("\n") == 1
        assert files_here() == {"trace.jsonl": "precious"}


def test_a_run_in_which_everything_is_refused_is_a_run_and_has_a_trace(
    oracle: Oracle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.jsonl").write_text("precious")
    long = " ".join(["w5"] * 200)  # more than the pages of this scenario hold
    outcome = call(capsys, "run", "preemption", "--model", oracle.folder, "--prompt", long)
    assert (outcome.code, outcome.out) == (5, "")
    assert "trace.jsonl already existed: it is now trace.1.jsonl" in outcome.err
    assert "the pool has 24" in failure(outcome.err)
    records = list(read_trace(tmp_path / "trace.jsonl"))
    assert any(isinstance(record, ev.RequestRefused) for record in records)
    assert files_here()["trace.1.jsonl"] == "precious"


def test_an_empty_prompt_is_one_line_and_moves_no_trace(
    oracle: Oracle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.jsonl").write_text("precious")
    outcome = call(capsys, "run", "example", "--model", oracle.folder, "--prompt", "")
    assert (outcome.code, outcome.out) == (5, "")
    assert outcome.err == "nvtrace: a prompt must have at least one token; this one is empty\n"
    assert files_here() == {"trace.jsonl": "precious"}


@pytest.mark.parametrize(
    "before",
    [
        {},
        {"t.jsonl": "old 0"},
        {"t.jsonl": "old 0", "t.rank1.jsonl": "old 1", "t.rank2.jsonl": "old 2"},
        {"t.jsonl": "old 0", "t.1.jsonl": "older", "notes.txt": "mine"},
    ],
    ids=["nothing", "one rank", "three ranks", "others beside it"],
)
@pytest.mark.parametrize("has_rank_1", [True, False])
def test_without_an_engine_every_file_is_what_it_was(
    before: dict[str, str], has_rank_1: bool, tmp_path: Path
) -> None:
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    with (
        contextlib.suppress(OSError),
        stopping_between_steps(lambda _events: None) as tap,
        recording(tmp_path / "t.jsonl", tap, load_catalog("en")) as observer,
    ):
        assert (tmp_path / "t.jsonl").read_text() == ""
        if has_rank_1:  # as an engine does when it starts
            config = Config.create(TINY_QWEN3, {"tensor_parallel_size": 2})
            observer.engine_init(config, ModelConfig.from_folder(TINY_QWEN3))
            assert observer.recipe is not None
            observer.recipe(1).close()
            assert (tmp_path / "t.rank1.jsonl").stat().st_size
        raise OSError
    assert files_here() == before


def test_a_device_that_takes_the_trace_is_left_alone(tmp_path: Path) -> None:
    ours, device = pty.openpty()
    (tmp_path / "link.jsonl").symlink_to(os.ttyname(device))
    with (
        contextlib.suppress(OSError),
        stopping_between_steps(lambda _events: None) as tap,
        recording(tmp_path / "link.jsonl", tap, load_catalog("en")),
    ):
        raise OSError
    assert (tmp_path / "link.jsonl").is_symlink()
    assert stat.S_ISCHR((tmp_path / "link.jsonl").stat().st_mode)
    assert os.read(ours, 100).startswith(b'{"event":"TRACE_HEADER"')
    os.close(device)
    os.close(ours)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "out", "link"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_trace_never_goes_where_the_answers_or_the_messages_go(
    stream: str, name: str, tmp_path: Path
) -> None:
    if stream == "stderr":
        name = name.replace("stdout", "stderr").replace("fd/1", "fd/2")
    (tmp_path / "link").symlink_to(f"/dev/{stream}")
    with (tmp_path / "out").open("w+", encoding="utf-8") as file:
        options: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            stream: file,
        }
        done = subprocess.run(
            command("run", "example", "--out", name),
            **options,
            text=True,
            env=environment(),
            cwd=tmp_path,
            check=False,
        )
        said = done.stderr if stream == "stdout" else (tmp_path / "out").read_text()
    assert done.returncode == 2
    what = "answers" if stream == "stdout" else "messages"
    assert said == (
        f"nvtrace: --out {name}: a trace needs a file of its own, because {what} go to {stream}\n"
    )
    if stream == "stdout":
        assert (tmp_path / "out").read_text() == ""
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "out"]


@pytest.mark.parametrize("arguments", [("bench",), ("whatif", "trace.jsonl")], ids=" ".join)
def test_no_command_writes_its_file_to_stdout(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.jsonl").write_bytes(Recording(BUSY).data)
    outcome = call(capsys, *arguments, "--out", "-")
    assert (outcome.code, outcome.out) == (2, "")
    assert "needs a file of its own, because answers go to stdout" in outcome.err
    assert [file.name for file in tmp_path.iterdir()] == ["trace.jsonl"]


@pytest.mark.parametrize("arguments", [("run", "example"), ("bench",)], ids=" ".join)
def test_where_one_may_not_write_is_said_before_a_model_is_loaded(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(name: Path, *_arguments: object) -> int:
        raise PermissionError(13, "Permission denied", str(name))

    monkeypatch.setattr("nvtrace.files.os.open", refuse)
    monkeypatch.setattr(ModelConfig, "from_folder", pytest.fail)
    outcome = call(capsys, *arguments, "--out", "x.jsonl")
    monkeypatch.undo()
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "nvtrace: x.jsonl cannot be written (Permission denied)\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "out"),
    [
        ("run example", "trace.jsonl"),
        ("run example --out x.jsonl.zst", "x.jsonl.zst"),
        ("run example --out x.jsonl --tp 2", "x.rank1.jsonl"),
        ("bench --out x.json", "x.json"),
        ("whatif {trace} --out x.jsonl", "x.jsonl"),
        *((f"export {{trace}} --to {to} --out x", "x") for to in Format),
    ],
)
def test_a_folder_in_which_nobody_may_write_is_one_sentence(
    line: str,
    out: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(Recording(BUSY).data)
    monkeypatch.setattr(ModelConfig, "from_folder", pytest.fail)
    monkeypatch.chdir("/sys" if sys.platform == "linux" else "/")  # root may not either
    outcome = call(capsys, *line.format(trace=trace).split())
    assert (outcome.code, outcome.out) == (74 if line.startswith("export") else 2, "")
    start, _, reason = outcome.err.partition(" cannot be written (")
    assert start == f"nvtrace: {out}"
    assert reason.endswith(")\n")
    assert "Errno" not in reason


@pytest.mark.parametrize("command_", ["run", "bench"])
def test_a_path_below_a_file_is_no_place_for_a_file(
    command_: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    name = ["example"] if command_ == "run" else []
    outcome = call(capsys, command_, *name, "--out", "file/trace.jsonl")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "nvtrace: --out file/trace.jsonl: there is no folder file\n"
    assert files_here() == {"file": "mine"}


def test_a_refused_request_does_not_stop_the_others(
    oracle: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    long = " ".join(["w5"] * 600)
    outcome = call(capsys, *run_arguments(oracle, "--prompt", long, "--max-tokens", "2"))
    assert outcome.code == 0
    assert "seq -  w5 w5" in outcome.out
    assert "the prompt has 600 tokens" in outcome.out
    assert text_of(oracle.greedy([8], 2)) in outcome.out


def test_an_exception_within_the_engine_is_one_line_and_in_the_trace(
    oracle: Oracle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def explode(_self: ModelRunner, _batch: object, _engine_step: int) -> None:
        raise RuntimeError("the device\ncaught fire")

    monkeypatch.setattr(ModelRunner, "launch", explode)
    outcome = call(capsys, *run_arguments(oracle))
    assert (outcome.code, outcome.out) == (5, "")
    assert failure(outcome.err) == (
        r"nvtrace: the run failed: RuntimeError: the device\ncaught fire"
    )
    records = list(read_trace(tmp_path / "trace.jsonl"))
    assert isinstance(records[-1], Footer)
    assert records[-1].exit == "error"
    assert any(isinstance(record, ev.EngineError) for record in records)
    assert "failed: RuntimeError" in call(capsys, "replay", "trace.jsonl", "--plain").out


class FullDisk(io.BytesIO):
    """A file that takes nothing."""

    def write(self, _line: object) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_does_not_stop_the_run_but_fails_it(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        recorder, "open_sink", lambda _path, **_options: (pipeline.Sink(FullDisk()), None)
    )
    outcome = call(capsys, *run_arguments(oracle, "--max-tokens", "2"))
    assert outcome.code == 5
    assert text_of(oracle.greedy([8], 2)) in outcome.out  # the answers are not thrown away
    assert outcome.err.count("No space left on device") == 2  # when it happened, and at the end
    assert "trace.jsonl is incomplete" in failure(outcome.err)


def test_a_recorder_that_raises_does_not_stop_the_run_but_fails_it(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slip(*_args: object) -> None:
        raise LookupError("no such field")

    monkeypatch.setattr(recorder.Recorder, "state_transition", slip)
    outcome = call(capsys, *run_arguments(oracle, "--max-tokens", "2"))
    assert outcome.code == 5
    assert text_of(oracle.greedy([8], 2)) in outcome.out
    assert outcome.err.count("Recorder.state_transition() raised this error. The run goes on") == 1
    assert failure(outcome.err) == (
        "nvtrace: trace.jsonl is incomplete: the recorder's state_transition() raised "
        "LookupError: no such field"
    )


def test_a_trace_that_is_removed_while_it_is_written_fails_the_run(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = recorder.Recorder.engine_ready

    def remove(self: recorder.Recorder, *facts: Any) -> None:  # noqa: ANN401 - the hook's own
        ready(self, *facts)
        Path("trace.jsonl").unlink()

    monkeypatch.setattr(recorder.Recorder, "engine_ready", remove)
    outcome = call(capsys, *run_arguments(oracle, "--max-tokens", "2"))
    assert outcome.code == 5
    assert text_of(oracle.greedy([8], 2)) in outcome.out
    assert failure(outcome.err) == (
        "nvtrace: trace.jsonl was removed while it was written: there is no trace"
    )
    assert files_here() == {}


@pytest.mark.parametrize("moved", ["file", "folder", "renamed", "unknown"])
def test_a_trace_that_is_moved_while_it_is_written_is_told_where_it_is(
    moved: str,
    oracle: Oracle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ready = recorder.Recorder.engine_ready
    out = Path("d", "trace.jsonl")
    new = {"file": "e/trace.jsonl", "folder": "g/trace.jsonl", "renamed": "d/other.jsonl"}.get(
        moved, "e/linked.jsonl"
    )
    Path("d").mkdir()
    Path("e").mkdir()

    def move(self: recorder.Recorder, *facts: Any) -> None:  # noqa: ANN401 - the hook's own
        ready(self, *facts)
        if moved == "folder":
            Path("d").rename("g")
        elif moved == "unknown":  # not the name by which it was opened
            Path(new).hardlink_to(out)
            out.unlink()
        else:
            out.rename(new)

    monkeypatch.setattr(recorder.Recorder, "engine_ready", move)
    outcome = call(capsys, *run_arguments(oracle, "--max-tokens", "2", "--out", str(out)))
    assert outcome.code == 0
    assert text_of(oracle.greedy([8], 2)) in outcome.out
    assert isinstance([*read_trace(new, warn=pytest.fail)][-1], Footer)
    assert f"{out} was moved " in outcome.err
    if moved == "unknown":
        assert "look for it there" in outcome.err
        assert "next:" not in outcome.err
    else:
        place = Path(new) if moved == "renamed" else tmp_path / new
        assert f"this run's trace is now {place}\n" in outcome.err
        assert f"the trace is in {place}; next:" in outcome.err


# -- Ctrl-C ----------------------------------------------------------------------------------------


def step_end(step: int) -> ev.StepEnd:
    return ev.StepEnd(
        event_id=1,
        ts_ns=0,
        step=step,
        phase="postprocess",
        batch_phase="decode",
        num_seqs=1,
        num_batched_tokens=1,
        num_tokens_stat=-1,
        finished=[],
        waiting_len=0,
        running_len=1,
        free_blocks=0,
        wall_ns=0,
        schedule_ns=0,
        prepare_ns=0,
        forward_ns=0,
        sample_ns=0,
        postprocess_ns=0,
        gpu_ns=None,
    )


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_waits_for_the_end_of_the_step() -> None:
    heard: list[ev.Event] = []
    with stopping_between_steps(heard.extend) as tap:
        tap([step_end(1)])
        interrupt()
        tap([])  # what comes within a step
        with pytest.raises(KeyboardInterrupt):
            tap([step_end(2)])
    assert [event.step for event in heard] == [1, 2]


def test_ctrl_c_strikes_at_once_before_the_first_step_and_when_pressed_twice() -> None:
    with stopping_between_steps(lambda _events: None), pytest.raises(KeyboardInterrupt):
        interrupt()
    with stopping_between_steps(lambda _events: None) as tap:
        tap([step_end(1)])
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupt()


def test_ctrl_c_that_got_lost_before_the_first_step_strikes_at_the_next_events() -> None:
    heard: list[ev.Event] = []
    with stopping_between_steps(heard.extend) as tap:
        with contextlib.suppress(KeyboardInterrupt):  # as an import of C code may do
            interrupt()
        with pytest.raises(KeyboardInterrupt):
            tap([])
        with tap.blamed():
            pass
        tap([])  # while the trace is closed, nothing is raised any more


def test_a_failure_after_ctrl_c_is_an_interruption_and_one_before_is_not() -> None:
    with stopping_between_steps(lambda _events: None) as tap:
        with contextlib.suppress(KeyboardInterrupt):
            interrupt()
        with pytest.raises(KeyboardInterrupt), tap.blamed():
            raise ImportError("initialization failed")
    with (
        stopping_between_steps(lambda _events: None) as tap,
        pytest.raises(ImportError),
        tap.blamed(),
    ):
        raise ImportError("initialization failed")


def test_ctrl_c_turned_into_another_error_while_the_engine_loads_still_ends_with_130(
    oracle: Oracle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_arguments: object) -> None:
        try:
            interrupt()
        except KeyboardInterrupt as error:
            raise ImportError("initialization failed") from error

    monkeypatch.setattr("nvtrace.scenarios.run_scenario", load)
    (tmp_path / "trace.jsonl").write_text("precious")
    outcome = call(capsys, *run_arguments(oracle))
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")
    assert files_here() == {"trace.jsonl": "precious"}


def test_afterwards_ctrl_c_is_as_it_was() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stopping_between_steps(lambda _events: None):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupted_run_leaves_a_whole_trace_and_code_130(
    oracle: Oracle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = subprocess.Popen(
        command(*run_arguments(oracle, "--prompt", "w9", "--max-tokens", "450")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=tmp_path,
    )
    assert process.stderr is not None
    assert process.stdout is not None
    for line in process.stderr:
        if line.startswith("step 50 "):
            process.send_signal(signal.SIGINT)
            break
    last_words = process.stderr.read().splitlines()[-1]
    assert process.wait(timeout=60) == 130
    assert process.stdout.read() == ""
    process.stderr.close()
    process.stdout.close()
    assert last_words == "nvtrace: interrupted; trace.jsonl holds every step up to here"
    records = list(read_trace(tmp_path / "trace.jsonl"))
    assert isinstance(records[-1], Footer)
    assert records[-1].exit == "interrupted"
    last_step = max(record.step or 0 for record in records if isinstance(record, ev.Event))
    ends = [record.step for record in records if isinstance(record, ev.StepEnd)]
    assert ends == list(range(1, last_step + 1))
    replayed = call(capsys, "replay", tmp_path / "trace.jsonl", "--plain").out
    assert replayed.splitlines()[-1].endswith("interrupted")


# -- on a terminal ---------------------------------------------------------------------------------


def test_on_a_terminal_a_run_is_a_picture_that_moves(oracle: Oracle, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(*run_arguments(oracle, "--max-tokens", "30")),
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment(TERM="xterm-256color"),
        cwd=tmp_path,
    )
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
    answers, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"\x1b[2K" in written  # lines were redrawn
    assert "ended: " in written.decode()
    assert text_of(oracle.greedy([8], 30)) in answers.decode()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_moving_picture_has_a_line_for_each_request(language: Language) -> None:
    progress = Progress()
    progress.apply([enqueue(seq_id) for seq_id in range(3)])
    progress.requests[1].num_tokens = 4
    progress.requests[1].state = "decode"
    progress.requests[2].num_tokens = 8
    progress.requests[2].state, progress.requests[2].reason = "ended", "max_tokens"
    catalog = load_catalog(language)
    console = Console(file=io.StringIO(), width=80, theme=THEME)
    with console.capture() as capture:
        console.print(progress_view(progress, catalog, UNICODE))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert lines[0] == "seq 0  " + "╌" * 31 + f"  0/8  {catalog.ui('state_waiting')}"
    assert lines[1].startswith("seq 1  " + "━" * 15 + "╌" * 16 + "  4/8  decode")
    assert lines[2].startswith("seq 2  " + "━" * 30 + "●  8/8  ")
    assert len(lines) == 4
    assert max(map(cell_len, lines)) <= 80


def enqueue(seq_id: int) -> ev.RequestEnqueue:
    return ev.RequestEnqueue(
        event_id=1,
        ts_ns=0,
        step=None,
        phase="ingress",
        seq_id=seq_id,
        prompt_len=3,
        max_tokens=8,
        temperature=0.6,
        top_k=None,
        top_p=1.0,
        seed=0,
        ignore_eos=False,
        waiting_len=seq_id + 1,
        prompt_token_ids=[5, 6, 7],
    )


def test_what_is_computed_again_after_a_preemption_is_a_prefill() -> None:
    progress = Progress()
    progress.apply([enqueue(0), enqueue(1)])
    for request in progress.requests.values():
        request.num_tokens = 4
    lengths: dict[str, Any] = {
        "scheduled": 1,
        "num_batched_tokens": 7,
        "token_budget": 9,
        "waiting_len": 0,
        "running_len": 2,
        "free_blocks": 5,
        "ts_ns": 1,
        "event_id": 3,
    }
    again = ev.SchedulePrefill(
        reason="waiting_admissible",
        phase="prefill",
        step=7,
        engine_step=7,
        seq_ids=[1],
        num_scheduled_tokens=[7],
        num_computed_tokens=[0],
        num_cached_tokens=[0],
        **lengths,
    )
    progress.requests[0].state = "decode"
    progress.apply([again])
    assert [progress.requests[seq_id].state for seq_id in (0, 1)] == ["idle", "prefill"]
    mixed = ev.ScheduleMixed(
        phase="mixed",
        step=8,
        engine_step=8,
        num_decodes=1,
        num_prefills=1,
        seq_ids=[1, 0],
        num_scheduled_tokens=[1, 7],
        num_computed_tokens=[7, 0],
        num_cached_tokens=[0, 0],
        **lengths,
    )
    progress.apply([mixed])
    assert [progress.requests[seq_id].state for seq_id in (0, 1)] == ["prefill", "decode"]


# -- the scenarios, on the model that ships --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "story"),
    [
        ("example", "batch 2 -> 1"),
        ("shared-prefix", "tokens cached"),
        ("chunked-prefill", "seq 0: tokens 0-7 of 11"),
        ("preemption", "blocks freed"),
        ("late-join", "seq 1 arrives"),
        ("static-vs-continuous", "seq 4 waits: 4"),
    ],
)
def test_the_story_of_a_scenario_shows_in_its_replay(
    name: str, story: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "run", name)
    assert outcome.code == 0, outcome.err
    assert f"seq {len(SCENARIOS[name].messages) - 1}  " in outcome.out
    replayed = call(capsys, "replay", "trace.jsonl", "--plain")
    assert (replayed.code, replayed.err) == (0, "")
    assert story in replayed.out


def test_every_scenario_has_its_story_tested() -> None:
    [parameters] = test_the_story_of_a_scenario_shows_in_its_replay.pytestmark  # type: ignore[attr-defined]  # set by the decorator
    assert {name for name, _ in parameters.args[1]} == set(SCENARIOS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tp", "99999999999"), "1024"),
        (("--tp", "3"), "cannot be split by tensor_parallel_size=3"),
        (("--device", "gpu"), "one of auto, cpu, cuda"),
        (("--out", "x" * 300), "File name too long"),
    ],
    ids=["too many ranks", "uneven ranks", "device", "name"],
)
def test_what_can_never_run_is_a_usage_error(
    options: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = spawn("run", "example", *options)
    assert outcome.code == 2
    assert words in outcome.err
    assert not list(tmp_path.iterdir())
