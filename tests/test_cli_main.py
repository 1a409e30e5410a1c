"""The command line as a whole: help, errors, exit codes, pipes."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from nanovllm import __version__
from nanovllm.engine.policies import POLICIES
from nvtrace.whatif.settings import NAMES
from nvtrace_cli import main as main_module
from nvtrace_cli.main import main
from nvtrace_cli.options import Lang, locale_language, say
from nvtrace_cli.views.console import is_terminal, make_console
from support.cli import call, command, environment, spawn
from support.cli_traces import article_run, write_trace

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = (
    *("run", "replay", "tail", "check", "stats", "at", "explain", "diff", "whatif", "events"),
    *("export", "validate", "schema", "bench", "doctor"),
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("trace") / "trace.jsonl", article_run())


def modules_after(*arguments: str) -> set[str]:
    """The top-level modules that a command has loaded when it ends."""
    script = (
        "import json, sys\n"
        "from nvtrace_cli.main import run_command\n"
        f"code = run_command({list(arguments)!r})\n"
        "names = sorted({name.partition('.')[0] for name in sys.modules})\n"
        "sys.stderr.write(json.dumps([code, names]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env=environment(), check=True
    )
    code, names = json.loads(done.stderr)
    assert code == 0
    return set(names)


@pytest.mark.parametrize("arguments", [["--help"], *([c, "--help"] for c in COMMANDS)])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    heavy = {"torch", "pandas", "transformers", "rich", "msgspec", "structlog", "numpy"}
    assert modules_after(*arguments) & heavy == set()


def test_replaying_and_looking_up_events_load_no_torch(trace: Path) -> None:
    heavy = {"torch", "pandas", "transformers"}
    assert modules_after("replay", str(trace)) & heavy == set()
    assert modules_after("events", "PREEMPT") & heavy == set()
    assert modules_after("run", "--list") & heavy == set()


def test_help_names_what_an_option_takes(capsys: pytest.CaptureFixture[str]) -> None:
    def told(name: str) -> str:
        return " ".join(call(capsys, name, "--help").out.split())

    assert f"What goes into a step: {', '.join(POLICIES)}." in told("run")
    assert f"{', '.join(NAMES)}." in told("whatif")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["-h"], []):
        outcome = call(capsys, *arguments)
        assert outcome.code == 0
        assert outcome.err == ""
        assert all(f"\n  {name} " in outcome.out for name in COMMANDS)


def test_version_is_the_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version").out == f"nvtrace {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dance"], "dance"),
        (["replay"], "FILE"),
        (["replay", "x", "--loud"], "--loud"),
        (["replay", "x", "--view", "upside-down"], "--view"),
        (["replay", "x", "--lang", "tlh"], "--lang"),
        (["replay", "x", "--seq", "one"], "--seq"),
        (["replay", "x", "--json", "--plain"], "--plain"),
        (["replay", "x", "--plain", "--view", "timeline"], "--plain"),
        (["replay", "x", "--event", "PREEMPT", "--view", "timeline"], "--event"),
        (["replay", "x", "--event", "TELEPORT"], "TELEPORT"),
        (["replay", "x", "--steps", "a..b"], "--steps a..b"),
        (["replay", "x", "--steps", ".."], "--steps .."),
        (["replay", "x", "--steps", "9..3"], "--steps 9..3"),
        (["replay", "x", "--speed", "warp"], "--speed warp"),
        (["replay", "x", "--speed", "0x"], "--speed 0x"),
        (["replay", "x", "--speed", "infx"], "--speed infx"),
        (["run"], "example"),
        (["run", "exampel"], "did you mean example?"),
        (["run", "marathon"], "late-join"),
        (["run", "example", "--max-tokens", "0"], "--max-tokens"),
        (["run", "example", "--max-tokens", "1.5"], "--max-tokens"),
        (["run", "example", "--temperature", "-1"], "--temperature"),
        (["run", "example", "--temperature", "nan"], "--temperature"),
        (["run", "example", "--temperature", "inf"], "--temperature"),
        (["run", "example", "--temperature", "1e7"], "--temperature"),
        (["run", "example", "--max-tokens", str(2**31)], "--max-tokens"),
        (["run", "example", "--prompt", "caf\udce9"], r"--prompt caf\udce9"),
        (["run", "example", "--seed", "-1"], "--seed"),
        (["run", "example", "--seed", str(2**64)], "--seed"),
        (["run", "example", "--out", "-"], "--out"),
        (["run", "example", "--out", "."], "--out"),
        (["run", "example", "--out", "no/such/folder/t.jsonl"], "no/such/folder"),
        (["events", "TELEPORT"], "nvtrace events"),
        (["events", "PREEMT"], "did you mean PREEMPT?"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, *arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("nvtrace: ")
    assert outcome.err.count("\n") == 1
    assert said in outcome.err


def test_main_leaves_with_the_commands_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["events", "TELEPORT"])
    assert left.value.code == 2
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    capsys.readouterr()


def break_replay(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let `replay` raise."""

    def raise_it(_self: object, **_parts: bool) -> None:
        raise error

    monkeypatch.setattr("nvtrace_cli.views.replay.Replay.show", raise_it)


def test_a_fault_of_our_own_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NVTRACE_DEBUG", raising=False)
    break_replay(monkeypatch, RuntimeError("the\nsky \x1b[31m fell"))
    outcome = call(capsys, "replay", "x")
    assert outcome.code == 70
    assert outcome.err.count("\n") == 1
    assert r"RuntimeError: the\nsky \x1b[31m fell" in outcome.err
    assert "NVTRACE_DEBUG" in outcome.err


def test_with_nvtrace_debug_the_exception_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTRACE_DEBUG", "1")
    break_replay(monkeypatch, RuntimeError("the sky fell"))
    with pytest.raises(RuntimeError, match="the sky fell"):
        main_module.run_command(["replay", "x"])


def test_ctrl_c_ends_with_130_and_no_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_replay(monkeypatch, KeyboardInterrupt())
    outcome = call(capsys, "replay", "x")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")


INTERRUPT_AT = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Interrupter(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            sys.meta_path.remove(self)
            sys.stdout.write(name)
            sys.stdout.flush()
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
"""
"""Presses Ctrl-C when a module is about to be loaded. Python runs it at its own start."""


@pytest.mark.parametrize(
    "module",
    [
        "nvtrace_cli.main",
        "typer",
        "nvtrace_cli.run",
        "nvtrace_cli.stderr",
        "nvtrace.scenarios",
        "rich",
        "nvtrace.recorder",
        "structlog",
        "transformers",
        "torch",
        "nanovllm.engine.llm_engine",
    ],
)
def test_ctrl_c_while_modules_load_ends_with_130_and_no_words(module: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT_AT)
    variables = environment(INTERRUPT_AT=module)
    variables["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{variables['PYTHONPATH']}"
    done = subprocess.run(
        command("run", "example", "--out", tmp_path / "trace.jsonl"),
        capture_output=True,
        env=variables,
        cwd=tmp_path,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, module.encode(), b"")
    assert not (tmp_path / "trace.jsonl").exists()


def test_an_interrupted_command_ends_with_130_even_where_python_would_end_by_the_signal() -> None:
    script = (
        "import signal, nvtrace_cli.main as main\n"
        "def run(arguments):\n"
        "    try:\n"
        "        exec('signal.raise_signal(signal.SIGINT)')  # as dataclass() runs strings\n"
        "    except KeyboardInterrupt:\n"
        "        return main.INTERRUPTED\n"
        "main.run_command = run\n"
        "main.main([])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env=environment(), check=False
    )
    assert (done.returncode, done.stderr) == (130, b"")


def test_loading_the_command_line_leaves_ctrl_c_as_it_was() -> None:
    script = (
        "import signal, threading\n"
        "before = signal.getsignal(signal.SIGINT)\n"
        "def load(): import nvtrace_cli.main\n"
        "thread = threading.Thread(target=load)\n"
        "thread.start(); thread.join()\n"
        "import nvtrace_cli.main\n"
        "assert signal.getsignal(signal.SIGINT) is before\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env=environment(), check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("options", [[], ["--view", "log"], ["--json"], ["--plain", "--unfold"]])
def test_a_closed_pipe_is_silent(trace: Path, options: list[str]) -> None:
    process = subprocess.Popen(
        command("replay", trace, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # before the first byte comes
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), errors) == (0, b"")


def test_what_is_said_moves_no_cursor_and_breaks_no_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say("red\x1b[31m\nand more")
    assert capsys.readouterr().err == "nvtrace: red\\x1b[31m\\nand more\n"


class BrokenStream(io.StringIO):
    """A pipe that nobody reads any more. Counts who tries."""

    num_tries = 0

    @override
    def write(self, _text: str) -> int:
        self.num_tries += 1
        raise BrokenPipeError


def closed_stream() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, BrokenStream(), closed_stream()])
def test_without_a_stderr_nothing_is_said_and_nothing_fails(
    stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    say("is anybody there?")
    assert main_module.run_command(["dance"]) == 2
    assert not is_terminal(stderr=True)


def test_a_console_on_a_broken_stderr_turns_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = BrokenStream()
    monkeypatch.setattr(sys, "stderr", stream)
    console = make_console(stderr=True)
    console.print("one")
    console.print("two")
    assert stream.num_tries == 1


def test_a_process_without_streams_ends_as_any_other() -> None:
    for redirections in ("2>&-", ">&- 2>&-"):
        line = f"{shlex.join(command('dance'))} {redirections}"
        done = subprocess.run(line, shell=True, env=environment(), check=False)  # noqa: S602 - our own line
        assert done.returncode == 2


def test_the_module_is_the_command() -> None:
    outcome = spawn("--version")
    assert (outcome.code, outcome.out) == (0, f"nvtrace {__version__}\n")


@pytest.mark.parametrize(
    ("variables", "language"),
    [
        ({}, Lang.EN),
        ({"LANG": "zh_CN.UTF-8"}, Lang.ZH),
        ({"LANG": "en_US.UTF-8"}, Lang.EN),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, Lang.EN),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_TW"}, Lang.ZH),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}, Lang.ZH),
    ],
)
def test_the_language_is_the_locales(variables: dict[str, str], language: Lang) -> None:
    assert locale_language(variables) is language


def test_the_locale_chooses_the_words_and_lang_overrides_it(trace: Path) -> None:
    assert "时间线" in spawn("replay", trace, LC_ALL="zh_CN.UTF-8", PYTHONUTF8="1").out
    chosen = spawn("replay", trace, "--lang", "en", LC_ALL="zh_CN.UTF-8", PYTHONUTF8="1")
    assert "Timeline" in chosen.out
