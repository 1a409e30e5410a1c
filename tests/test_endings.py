"""Endings of real processes that leave no mess: no orphan, no torn trace, one clear sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nvtrace import events as ev
from nvtrace.envelope import Footer
from nvtrace.reader import rank_path, read_trace
from nvtrace.replay import fold_steps
from support.cli import call, command, environment
from support.ranks import PATIENCE, are_gone, start_script
from support.recording import BUSY, Recording

if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import Popen

    from nvtrace.envelope import Record

pytestmark = pytest.mark.slow

FOREVER = ("run", "example", "--tp", "2", "--max-tokens", "4000")  # minutes, if nobody ends it


# -- a run with two ranks, in its middle -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Middle:
    """`nvtrace run --tp 2` after its 50th step, the first process of a session of its own."""

    process: Popen[str]
    trace: Path

    def members(self) -> dict[int, str]:
        """Every living process of the session, by pid, and its command line."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended just now
                stat = (folder / "stat").read_text(encoding="utf-8")
                state, _, _, session, *_ = stat.rpartition(")")[2].split()
                if int(session) == self.process.pid and state != "Z":
                    found[int(folder.name)] = (folder / "cmdline").read_text(encoding="utf-8")
        return found

    def worker(self) -> int:
        """The pid of rank 1."""
        (pid,) = [pid for pid, line in self.members().items() if "spawn_main" in line]
        return pid

    def wait(self) -> tuple[int, str, str]:
        """Let everybody end. Returns the exit code, what stdout has, and stderr's last line."""
        out, err = self.process.communicate(timeout=PATIENCE)
        assert are_gone(self.members())
        return self.process.returncode, out, err.splitlines()[-1] if err else ""


@pytest.fixture
def middle(tmp_path: Path) -> Iterator[Middle]:
    process = subprocess.Popen(
        command(*FOREVER),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=tmp_path,
        start_new_session=True,
    )
    with ending(process):
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("step 50 "):
                break
        assert process.poll() is None, said
        yield Middle(process, tmp_path / "trace.jsonl")


@contextmanager
def ending(process: Popen[str]) -> Iterator[None]:
    """Whatever the test finds: nothing of the process's session stays."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def footers(*traces: Path) -> list[str]:
    """How each trace says that it ended; a warning about any is a failure."""
    records = [list(read_trace(trace, warn=pytest.fail))[-1] for trace in traces]
    return [record.exit for record in records if isinstance(record, Footer)]


def steps(records: list[Record]) -> list[int | None]:
    """The steps in which the model ran."""
    return [record.step for record in records if isinstance(record, ev.RunEager)]


def test_ctrl_c_ends_a_run_with_two_ranks_after_a_whole_step(
    middle: Middle, capsys: pytest.CaptureFixture[str]
) -> None:
    os.killpg(middle.process.pid, signal.SIGINT)  # as a terminal does: the worker gets it as well
    last_words = "nvtrace: interrupted; trace.jsonl holds every step up to here"
    assert middle.wait() == (130, "", last_words)
    other = rank_path(middle.trace, 1)
    assert footers(middle.trace, other) == ["interrupted", "ok"]  # rank 1 was told to stop
    records = list(read_trace(middle.trace))
    whole = list(range(1, len(steps(records)) + 1))
    assert [record.step for record in records if isinstance(record, ev.StepEnd)] == whole
    assert steps(records) == steps(list(read_trace(other))) == whole
    replayed = call(capsys, "replay", middle.trace, "--plain")
    assert (replayed.code, replayed.err) == (0, "")
    assert replayed.out.splitlines()[-1].endswith("interrupted")


def test_a_killed_run_with_two_ranks_leaves_traces_that_read_and_no_worker(
    middle: Middle, capsys: pytest.CaptureFixture[str]
) -> None:
    middle.process.kill()
    assert middle.wait()[0] == -signal.SIGKILL
    num_steps, num_warnings = [], []
    for rank in (0, 1):
        warnings: list[str] = []
        records = list(read_trace(rank_path(middle.trace, rank), warn=warnings.append))
        # Rank 1 may hear the pipe close before it is ended, and close its trace in good order.
        assert len(warnings) == (0 if rank == 1 and isinstance(records[-1], Footer) else 1)
        num_warnings.append(len(warnings))
        ran = steps(records)
        assert ran == list(range(1, len(ran) + 1))
        num_steps.append(len(ran))
        if rank == 0:
            assert [step.index for step in fold_steps(records) if step.end is not None] == ran
    assert min(num_steps) >= 49  # what was said of step 50 comes after it was written
    assert abs(num_steps[0] - num_steps[1]) <= 1
    replayed = call(capsys, "replay", middle.trace, "--plain")
    assert (replayed.code, replayed.err.count("\n")) == (0, sum(num_warnings))


def test_a_killed_worker_fails_the_run_by_name(middle: Middle) -> None:
    os.kill(middle.worker(), signal.SIGKILL)
    code, out, last_words = middle.wait()
    assert (code, out) == (5, "")
    assert last_words.startswith("nvtrace: rank 1 was killed by SIGKILL")
    assert footers(middle.trace) == ["error"]


# -- a command that ends before its files are whole ------------------------------------------------


@contextmanager
def half_read(
    folder: Path, *arguments: str, before: tuple[str, ...] = ()
) -> Iterator[Popen[bytes]]:
    """A command that has begun a file in `folder`, and waits for the rest of a trace in stdin."""
    process = subprocess.Popen(
        [*before, *command(*arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(TMPDIR=str(folder)),
        cwd=folder,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(Recording(BUSY).data[:-10])
        process.stdin.flush()
        found, before_it = [*folder.rglob("*")], None
        while not found or len(found) != before_it:  # until it has taken in what there is
            assert process.poll() is None
            time.sleep(0.05)
            found, before_it = [*folder.rglob("*")], len(found)
        yield process
    finally:
        process.kill()
        process.communicate()


HALF_READ = [
    ("export", "-", "--to", "perfetto", "--out", "out.json"),
    ("export", "-", "--to", "csv", "--out", "out"),
    ("at", "-", "3"),
]


@pytest.mark.parametrize("arguments", HALF_READ, ids=" ".join)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
def test_a_signal_leaves_no_file_that_is_not_whole(
    number: signal.Signals, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    with half_read(tmp_path, *arguments) as process:
        process.send_signal(number)
        code = process.wait(PATIENCE)
    assert code == (130 if number == signal.SIGINT else -number)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("arguments", HALF_READ, ids=" ".join)
def test_under_nohup_a_hangup_ends_nothing(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with half_read(tmp_path, *arguments, before=("nohup",)) as process:
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


# -- a full disk -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_full_disk_is_said_once_and_the_answers_come_all_the_same(
    name: str, tmp_path: Path
) -> None:
    limit = 'ulimit -f 16; exec "$@"'  # no file may have more than 16 blocks of 512 or 1024 bytes
    run = command("run", "example", "--max-tokens", "128", "--json", "--out", name)
    done = subprocess.run(
        ["/bin/sh", "-c", limit, "sh", *run],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 5
    lines = done.stderr.splitlines()
    [loud] = [line for line in lines if "the trace can no longer be written" in line]
    assert "File too large" in loud
    assert lines[-1].startswith(f"nvtrace: {name} is incomplete, ")  # why the code is 5
    answers = json.loads(done.stdout)["outputs"]
    assert [answer["finish_reason"] for answer in answers] == ["length", "length"]
    warnings: list[str] = []
    records = list(read_trace(tmp_path / name, warn=warnings.append))
    assert len(warnings) == 1
    assert len(records) > 20
    assert (tmp_path / name).stat().st_size <= 16 * 1024


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("events",),
        ("replay", "trace.jsonl"),
        ("replay", "trace.jsonl", "--plain"),
        ("replay", "trace.jsonl", "--json"),
        ("replay", "trace.jsonl", "--view", "log"),
        ("run", "--list"),
        ("run", "example", "--max-tokens", "2", "--quiet", "--out", "new.jsonl"),
    ],
    ids=" ".join,
)
def test_a_stdout_that_takes_nothing_is_one_plain_sentence(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "trace.jsonl").write_bytes(Recording(BUSY).data)
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            command(*arguments),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=tmp_path,
            check=False,
        )
    reason = "[Errno 28] No space left on device"
    sentence = f"nvtrace: stdout cannot be written, so the output is incomplete: {reason}\n"
    assert (done.returncode, done.stderr) == (74, sentence)


# -- os.fork(): a child that has an engine which is not its own -----------------------------------

FORKS = """
    import gc, json, os, sys, warnings
    from nanovllm import LLM, SamplingParams
    from nanovllm.assets import TINY_QWEN3
    from nanovllm.errors import WorkerError

    def tokens(llm):
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        return llm.generate([[5, 6, 7]], params)[0]["token_ids"]

    def code_of_a_fork(act):
        if pid := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        act()
        sys.exit(7)  # in good order: whatever Python does at its end, it does

    if __name__ == "__main__":
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork beside threads
        engines = [LLM(TINY_QWEN3, tensor_parallel_size=2, num_kvcache_blocks=20)]
        before = tokens(engines[0])

        def generate():
            try:
                tokens(engines[0])
            except WorkerError as error:
                assert f"belong to process {os.getppid()}" in str(error)
                sys.exit(8)

        def let_go():
            engines.clear()
            gc.collect()

        codes = [
            code_of_a_fork(act) for act in (lambda: None, engines[0].exit, let_go, generate)
        ]
        print(json.dumps([codes, tokens(engines[0]) == before]))
"""
TRACED = """
    import multiprocessing, os, sys, warnings
    from nanovllm import LLM, SamplingParams
    from nanovllm.assets import TINY_QWEN3
    from nvtrace import record

    warnings.simplefilter("ignore", DeprecationWarning)  # as above

    def ask(llm):
        llm.add_request([5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True))

    def leave(number):
        if number == 0:
            sys.exit(7)  # within record(): leaves it in good order
        if number == 1:
            raise ValueError
        if number == 2:
            ask(llm)  # what the fork's copy of the engine does is not the parent's
            recorder.trace.drain()
        os._exit(7)

    for path in sys.argv[1:]:
        with record(path) as recorder:
            llm = LLM(TINY_QWEN3, observer=recorder, num_kvcache_blocks=20)
            ask(llm)  # a compressed trace has not written that yet
            codes = []
            for number in range(3):
                pid = os.fork()
                if not pid:
                    sys.stderr = open(os.devnull, "w")
                    leave(number)
                codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            process = multiprocessing.get_context("fork").Process(target=leave, args=(0,))
            process.start()
            process.join()
            while not llm.is_finished():
                llm.step()
        print(*codes, process.exitcode)
"""
GROUP = """
    import os, sys, torch, warnings
    from torch.distributed import HashStore
    from nanovllm.parallel.tensor_parallel import connect

    parallel = connect(HashStore(), 0, 1, torch.device("cpu"), 10.0, is_one_machine=True)
    warnings.simplefilter("ignore", DeprecationWarning)  # as above
    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    else:
        parallel.close()
        sys.exit(7)
"""


def said_by(folder: Path, script: str, *arguments: str) -> str:
    """What a script says, if it ends in good order."""
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script), encoding="utf-8")
    process = start_script(file, *arguments)
    with ending(process):
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
    return out


def test_a_fork_neither_ends_the_workers_of_its_parent_nor_waits_for_them(tmp_path: Path) -> None:
    assert json.loads(said_by(tmp_path, FORKS)) == [[7, 7, 7, 8], True]


def test_a_fork_writes_nothing_into_the_trace_of_its_parent(tmp_path: Path) -> None:
    traces = [tmp_path / f"trace.{ending}" for ending in ("jsonl", "jsonl.gz", "jsonl.zst")]
    assert said_by(tmp_path, TRACED, *map(str, traces)) == "7 1 7 7\n" * len(traces)
    for trace in traces:
        records = list(read_trace(trace, warn=pytest.fail))
        assert [type(record) for record in records].count(Footer) == 1
        assert len([record for record in records if isinstance(record, ev.RequestEnqueue)]) == 1
        assert steps(records) == [1, 2]


def test_a_group_of_ranks_that_a_fork_leaves_is_not_waited_for(tmp_path: Path) -> None:
    assert said_by(tmp_path, GROUP) == "7\n"
