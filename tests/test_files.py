"""Files that are ours, and files that are not: races for one name, pipes, devices, links."""

from __future__ import annotations

import errno
import json
import os
import pty
import signal
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nvtrace.catalog import load_catalog
from nvtrace.files import atomic_write, atomic_writes, create_file, give_name, move, try_beside
from nvtrace.pipeline import open_sink
from nvtrace.recorder import record
from nvtrace_cli.run import recording, stopping_between_steps
from support.cli import environment
from support.ranks import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nvtrace.files import Existing

WRITER = """
import sys
from nvtrace.recorder import record

for _ in range(int(sys.argv[1])):
    with record("trace.jsonl"):
        pass
"""


def run_ids(folder: Path) -> list[str]:
    """Of each file in a folder, all of which must be whole traces: whose it is."""
    ids = []
    for file in folder.iterdir():
        header, footer = map(json.loads, file.read_text("utf-8").splitlines())
        assert (header["event"], footer["event"]) == ("TRACE_HEADER", "TRACE_FOOTER")
        ids.append(header["run_id"])
    return sorted(ids)


def at_once(*deeds: Callable[[], None]) -> None:
    """Do all of this at the same time; what any of it raises is raised."""
    barrier = threading.Barrier(len(deeds))
    errors: list[BaseException] = []

    def wait_and(do: Callable[[], None]) -> None:
        try:
            barrier.wait(PATIENCE)
            do()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=wait_and, args=(deed,)) for deed in deeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@contextmanager
def no_links(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk without hard links."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        yield


# -- races for one name ----------------------------------------------------------------------------


@pytest.mark.parametrize(("num_writers", "num_rounds"), [(2, 100), (4, 50)])
def test_writers_that_race_for_one_name_each_keep_a_trace(
    num_writers: int, num_rounds: int, tmp_path: Path
) -> None:
    ids: list[str] = []

    def write() -> None:
        with record(tmp_path / "trace.jsonl") as recorder:
            ids.append(recorder.trace.run_id)
        assert recorder.trace.sink.place is not None

    for _ in range(num_rounds):
        at_once(*[write] * num_writers)
    assert len(ids) == num_writers * num_rounds
    assert run_ids(tmp_path) == sorted(ids)


def test_processes_that_race_for_one_name_each_keep_a_trace(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, "25"], env=environment(), cwd=tmp_path)
        for _ in range(3)
    ]
    assert [process.wait(PATIENCE) for process in processes] == [0, 0, 0]
    assert len({*run_ids(tmp_path)}) == len(list(tmp_path.iterdir())) == 75


def test_a_run_that_fails_removes_its_own_file_while_others_take_the_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    ids: list[str] = []

    def fail() -> None:
        with record(path) as recorder:
            recorder.undo()

    def succeed() -> None:
        with record(path) as recorder:
            ids.append(recorder.trace.run_id)

    for _ in range(50):
        at_once(fail, succeed)
    assert run_ids(tmp_path) == sorted(ids)


@pytest.mark.parametrize("has_older", [True, False])
@pytest.mark.parametrize("is_interrupted", [True, False])
def test_what_begins_while_a_run_fails_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, has_older: bool, is_interrupted: bool
) -> None:
    path = tmp_path / "trace.jsonl"
    if has_older:
        path.write_text("older")

    def fail() -> None:
        with (
            stopping_between_steps(lambda _events: None) as tap,
            recording(path, tap, load_catalog("en")),
        ):
            with record(path) as other:
                assert other.kept is not None
            if is_interrupted:
                signal.raise_signal(signal.SIGINT)
            raise OSError("broken checkpoint")

    with pytest.raises(KeyboardInterrupt if is_interrupted else OSError):
        fail()
    assert "TRACE_FOOTER" in path.read_text("utf-8")
    others = {file.name: file.read_text() for file in tmp_path.iterdir() if file != path}
    assert others == ({"trace.1.jsonl": "older"} if has_older else {})
    assert ("it is now" in capsys.readouterr().err) == has_older


def test_a_trace_that_another_run_renames_says_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with record(path) as first, record(path) as second:
        pass
    assert second.kept == tmp_path / "trace.1.jsonl"
    assert first.trace.sink.place == tmp_path / "trace.1.jsonl"
    assert second.trace.sink.place == path
    for recorder in (first, second):
        assert recorder.trace.run_id in recorder.trace.sink.place.read_text("utf-8")  # type: ignore[union-attr]  # not None: above


@pytest.mark.parametrize("existing", ["keep", "replace", "error"])
def test_a_file_that_comes_in_between_is_never_written_over(
    existing: Existing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody makes the file just after anybody could have looked whether it is there."""
    path = tmp_path / "trace.jsonl"
    really_open, times = os.open, iter(["the first"])

    def open_late(name: Path, flags: int, *mode: int) -> int:
        for _ in times:
            path.write_text("theirs")
        return really_open(name, flags, *mode)

    theirs = path
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_late)
        if existing == "error":
            with pytest.raises(FileExistsError, match="give another file"):
                create_file(path, existing)
        else:
            made = create_file(path, existing)
            made.file.close()
            theirs = made.kept or path
    assert theirs.read_text() == ("" if existing == "replace" else "theirs")


def test_on_a_disk_without_links_names_are_given_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, taken = tmp_path / "trace.jsonl", tmp_path / "trace.1.jsonl"
    path.write_text("older")
    taken.write_text("oldest")
    with no_links(monkeypatch):
        made = create_file(path, "keep")
        assert made.kept == tmp_path / "trace.2.jsonl"
        assert made.kept.read_text() == "older"
        assert made.undo()
    made.file.close()
    files = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert files == {"trace.jsonl": "older", "trace.1.jsonl": "oldest"}


def test_what_is_not_meant_stays_and_what_has_no_free_name_stays(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_text("a")
    other.write_text("b")
    assert move(path, [tmp_path / "c"], lambda _file: False) is None
    assert move(path, [other], lambda _file: True) is None
    assert move(tmp_path / "nothing", [tmp_path / "c"], Path.is_file) is None
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"a": "a", "b": "b"}
    assert give_name(path, [other, tmp_path / "c"]) == tmp_path / "c"


# -- what is no plain file -------------------------------------------------------------------------


def write_hello(path: Path) -> None:
    with atomic_write(path) as file:
        file.write(b"hello\n")


def test_a_pipe_is_written_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        got: list[bytes] = []
        at_once(lambda path=path: write_hello(path), lambda got=got: got.append(pipe.read_bytes()))  # type: ignore[misc]  # two lambdas without arguments
        assert got == [b"hello\n"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, pipe]


def test_a_trace_goes_into_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "trace.jsonl"
    os.mkfifo(pipe)
    got: list[bytes] = []

    def write() -> None:
        with record(pipe) as recorder:
            assert (recorder.kept, recorder.trace.sink.place) == (None, None)

    at_once(write, lambda: got.append(pipe.read_bytes()))
    assert [json.loads(line)["event"] for line in got[0].splitlines()] == [
        "TRACE_HEADER",
        "TRACE_FOOTER",
    ]
    assert [*tmp_path.iterdir()] == [pipe]


def test_a_device_is_written_and_a_link_to_it_stays(tmp_path: Path) -> None:
    ours, device = pty.openpty()
    link = tmp_path / "link"
    link.symlink_to(os.ttyname(device))
    write_hello(link)
    assert os.read(ours, 100) == b"hello\r\n"
    assert stat.S_ISCHR(link.stat().st_mode)
    assert link.is_symlink()
    os.close(ours)
    os.close(device)


@pytest.mark.parametrize("place", ["/dev/fd", "/proc/self/fd", "/proc/thread-self/fd", "link"])
@pytest.mark.parametrize("flags", [os.O_APPEND, 0])
def test_an_open_file_is_written_where_its_descriptor_is(
    place: str, flags: int, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / "file"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | flags)
    name = Path(place) / str(descriptor)
    if place == "link":
        name = tmp_path / "link"
        name.symlink_to(f"/dev/fd/{descriptor}")
    os.write(descriptor, b"before\n")
    write_hello(name)
    for existing in ("keep", "replace", "error"):
        with record(name, existing=existing) as recorder:
            assert (recorder.kept, recorder.trace.sink.place) == (None, None)
    try_beside(name)
    os.write(descriptor, b"after\n")
    os.close(descriptor)
    before, hello, *events, after = file.read_text("utf-8").splitlines()
    assert (before, hello, after) == ("before", "hello", "after")
    assert [json.loads(line)["event"] for line in events] == ["TRACE_HEADER", "TRACE_FOOTER"] * 3
    assert [*folder.iterdir()] == [file]


def test_another_processs_open_file_is_written_at_its_end(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before\n")
    with file.open("a") as stream:
        waiting = [sys.executable, "-c", "input()"]
        other = subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=stream)
    try:
        write_hello(Path(f"/proc/{other.pid}/fd/1"))
    finally:
        other.kill()
        other.communicate(timeout=PATIENCE)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {
        "file": "before\nhello\n"
    }


def test_what_is_not_open_for_writing_is_an_error_and_stays(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with file.open() as stream:
        name = Path(f"/dev/fd/{stream.fileno()}")
        for make_it in (write_hello, lambda path: create_file(path, "keep")):
            with pytest.raises(OSError, match="Bad file descriptor"):
                make_it(name)
    for closed in (name, Path("/dev/fd/99999999999999999999")):
        with pytest.raises(FileNotFoundError):
            write_hello(closed)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"file": "mine"}


def test_a_file_that_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "file", tmp_path / "link"
    for target_before in (None, "older"):
        if target_before is not None:
            target.write_text(target_before)
        else:
            link.symlink_to(target)
        write_hello(link)
        assert (link.is_symlink(), target.read_text()) == (True, "hello\n")
    assert [*(tmp_path / "far").iterdir()] == [target]


def test_a_file_keeps_its_permissions_and_a_users_part_is_not_touched(tmp_path: Path) -> None:
    out, part, link = tmp_path / "p.json", tmp_path / "p.json.part", tmp_path / "q.json.part"
    part.write_text("mine")
    link.symlink_to(part)
    for path in (out, tmp_path / "q.json"):
        path.write_text("older")
        path.chmod(0o640)
        write_hello(path)
        assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("hello\n", 0o640)
    assert (part.read_text(), link.is_symlink()) == ("mine", True)
    assert len(list(tmp_path.iterdir())) == 4


def test_what_was_there_stays_until_the_new_file_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    out.write_text("older")

    def break_off() -> None:
        with atomic_write(out) as file:
            file.write(b"half")
            file.flush()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"p.json": "older"}


# -- several files, or none ------------------------------------------------------------------------


def write_together(folder: Path) -> None:
    with atomic_writes() as draft_of:
        for name in ("a", "b", "deep/er/c"):
            draft_of(folder / name).write_text("new")


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("failing", ["a", "b", "c"])
def test_a_file_that_cannot_get_its_name_brings_all_the_others_back(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_links: bool
) -> None:
    (tmp_path / "a").write_text("older")
    (tmp_path / "mine").write_text("mine")
    replace = Path.replace

    def fail(path: Path, target: Path) -> Path:
        if target.name == failing and path.read_text() == "new":
            raise OSError(errno.EIO, "Input/output error")
        return replace(path, target)

    links = nullcontext() if has_links else no_links(monkeypatch)
    with links, monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="Input/output error"):
            write_together(tmp_path)
    files = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert files == {"a": "older", "mine": "mine"}
    write_together(tmp_path)
    assert (tmp_path / "a").read_text() == (tmp_path / "deep/er/c").read_text() == "new"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b", "deep", "mine"]


def test_a_name_that_is_no_plain_file_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "b")
    with pytest.raises(FileExistsError, match="is not a regular file"):
        write_together(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["b"]


def test_a_link_is_never_renamed_and_what_it_leads_to_never_lost(tmp_path: Path) -> None:
    target, link = tmp_path / "target.jsonl", tmp_path / "trace.jsonl"
    target.write_text("precious")
    link.symlink_to(target)
    with pytest.raises(FileExistsError, match="give another file"):
        open_sink(link, existing="error")
    assert target.read_text() == "precious"
    sink, kept = open_sink(link)
    sink.write(b"line\n")
    sink.close()
    assert kept == tmp_path / "target.1.jsonl"
    assert (link.is_symlink(), kept.read_text(), target.read_text()) == (True, "precious", "line\n")
