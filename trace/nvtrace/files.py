"""Creating and renaming files without touching files of other processes.

Another process can create or rename a file between a check and the action that follows it. So
nothing here checks a name and then acts on it:

    create_file    creates a file under a free name (O_EXCL)
    moved_aside    renames what has a name into a new folder of our own, to check it there
    give_name      gives a file a name with a hard link, which never replaces a file
    atomic_write   writes a file under a temporary name, then renames it

Links are followed: their target is kept or replaced, and the link stays. A pipe, a device, and a
name like /dev/fd/3 are written to directly.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import tempfile
import time
import uuid
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from os import stat_result

Existing = Literal["keep", "replace", "error"]

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_SECONDS_BETWEEN_LOOKS = 0.002
_LOOKS = 500  # while another process is renaming a file of ours
_MOST_LINKS = 40  # followed from one name; the same limit as on Linux
_DESCRIPTORS = re.compile(r"/proc/\d+(/task/\d+)?/fd|/dev/fd")  # folders of open files


class OwnFile(io.FileIO):
    """An unbuffered file, open for writing. A fork of the process does not write to it."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb")
        self._owner = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Is this a fork of the process that opened it?"""
        return os.getpid() != self._owner

    @override
    def write(self, data: Any, /) -> int:
        return memoryview(data).nbytes if self.is_forked else super().write(data)


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that is being written. Its descriptor identifies it, even if it is renamed.

    Attributes:
        file: open for writing.
        path: where it was created; None for a pipe or a device, which existed before.
        kept: the new name of an older file that had this path.
        older: the stat result of that file, which identifies it.
    """

    file: OwnFile
    path: Path | None
    kept: Path | None = None
    older: stat_result | None = None

    def names(self) -> list[Path]:
        """The file's current names in its folder; another process may have renamed it.

        If it has none there, the name that it was moved to, if the system knows it (Linux).
        """
        for _ in range(_LOOKS):
            names = self._names_now()
            if self.path is None or names or not os.fstat(self.file.fileno()).st_nlink:
                break
            time.sleep(_SECONDS_BETWEEN_LOOKS)  # it has no name here while it is being renamed
        return sorted(names, key=lambda name: name != self.path) or self._name_elsewhere()

    def _name_elsewhere(self) -> list[Path]:
        descriptor = self.file.fileno()
        with suppress(OSError):  # possible on Linux only
            if self.path is not None:
                name = Path(f"/proc/self/fd/{descriptor}").readlink()
                return _if_same(name, os.fstat(descriptor))
        return []

    def _names_now(self) -> list[Path]:
        own = os.fstat(self.file.fileno())
        names: list[Path] = []
        if self.path is not None:
            with suppress(OSError), os.scandir(self.path.parent) as entries:
                for entry in entries:
                    if entry.inode() == own.st_ino:
                        names += _if_same(self.path.parent / entry.name, own)
            names = names or _if_same(self.path, own)  # the folder may be unreadable
        return names

    def undo(self) -> bool:
        """Remove the file, and give the older one its name back, if the name is free.

        Returns:
            Whether an older file got its name back.
        """
        if self.path is None or self.file.is_forked:
            return False
        own = os.fstat(self.file.fileno())
        while names := self.names():
            for name in names:
                remove(name, lambda file: _is_same(file, own))
        kept, older = self.kept, self.older
        if kept is None or older is None:
            return False
        return move(kept, [self.path], lambda file: _is_same(file, older)) is not None


def create_file(path: Path, existing: Existing) -> NewFile:
    """Create a file for writing, or open an existing pipe or device.

    Args:
        path: its folder must exist.
        existing: if there is a file of this name, "keep" renames it, "replace" replaces it, "error"
            raises FileExistsError.

    Raises:
        OSError: it cannot be created.
    """
    kept: tuple[Path | None, stat_result | None] = (None, None)
    while True:
        special = _open_special(path)
        if special is not None:
            return NewFile(OwnFile(special), None)
        real = _end_of_link(path)
        if existing == "replace":
            with _draft(real) as (file, draft):
                draft.replace(real)
            return NewFile(file, real)
        try:
            return NewFile(OwnFile(os.open(real, _NEW, 0o666)), real, *kept)
        except FileExistsError as error:
            if existing == "error":
                raise FileExistsError(f"{path} exists: give another file") from error
        with moved_aside(real) as found:
            if found is not None and is_plain(found):
                older = found.lstat()
                kept = give_name(found, free_names(real)), older


def reopen(path: Path, meant: stat_result) -> NewFile | None:
    """Open a file that another process of this run has created; None if it was removed.

    Args:
        path: where it was created; it may have been renamed.
        meant: its stat result, which identifies it.
    """
    for name in chain([path], path.parent.iterdir()):
        if _if_same(name, meant):
            with suppress(FileNotFoundError):
                file = OwnFile(os.open(name, os.O_WRONLY))
                if os.path.samestat(os.fstat(file.fileno()), meant):
                    return NewFile(file, path)
                file.close()
    return None


def free_names(path: Path) -> Iterator[Path]:
    """trace.1.jsonl, trace.2.jsonl ...: names to try, which may be in use."""
    stem, dot, endings = path.name.partition(".")
    return (path.with_name(f"{stem}.{number}{dot}{endings}") for number in count(1))


def is_plain(path: Path) -> bool:
    """Is this a regular file, not a link to one?"""
    return stat.S_ISREG(path.lstat().st_mode)


def move(path: Path, names: Iterable[Path], is_meant: Callable[[Path], bool]) -> Path | None:
    """Rename the file at `path` to the first of `names` that is free.

    Args:
        path: of the file; links are not followed.
        names: in its folder.
        is_meant: checks that it is the right file: at `path`, and again after it was moved aside.

    Returns:
        The new name. None if nothing was renamed: there is no file, it is another one, or no name
        is free.
    """
    with _moved_aside_if(path, is_meant) as file:
        return None if file is None else give_name(file, names)


def remove(path: Path, is_meant: Callable[[Path], bool]) -> None:
    """Remove the file at `path`, if `is_meant`; see `move`."""
    with _moved_aside_if(path, is_meant) as file:
        if file is not None:
            file.unlink()


@contextmanager
def _moved_aside_if(path: Path, is_meant: Callable[[Path], bool]) -> Iterator[Path | None]:
    try:
        is_there = is_meant(path)
    except FileNotFoundError:
        is_there = False
    if not is_there:
        yield None
        return
    with moved_aside(path) as file:
        yield file if file is not None and is_meant(file) else None


@contextmanager
def moved_aside(path: Path) -> Iterator[Path | None]:
    """Move the file at `path` into a new folder of our own. Yields its path there, or None.

    If it is still there at the end, it gets its name back, or a free one if the name is in use.
    """
    folder = Path(tempfile.mkdtemp(prefix=".nvtrace-", dir=path.parent))
    file = folder / path.name
    try:
        try:
            path.rename(file)
        except FileNotFoundError:
            yield None
        else:
            yield file
    finally:
        if os.path.lexists(file):
            give_name(file, chain([path], free_names(path)))
        folder.rmdir()


def give_name(file: Path, names: Iterable[Path]) -> Path | None:
    """Rename a file in a folder of our own to the first of `names` that is free.

    Returns:
        The name, or None if none is free.

    Raises:
        OSError: it cannot be renamed for another reason.
    """
    for name in names:
        with suppress(FileExistsError):
            _rename_to_free(file, name)
            return name
    return None


def _rename_to_free(file: Path, name: Path) -> None:
    try:
        os.link(file, name, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:  # this disk has no hard links, or not to a file of another user
        os.close(os.open(name, _NEW))
        file.replace(name)
    else:
        file.unlink()


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces the one at `path` when it is complete; until then that stays.

    The new file has the permissions of the old one. A pipe or a device is written to directly.

    Raises:
        OSError: it cannot be written.
    """
    special = _open_special(path)
    if special is not None:
        with io.BufferedWriter(OwnFile(special)) as file:
            yield file
        return
    real = _end_of_link(path)
    with _draft(real) as (raw, draft):
        with io.BufferedWriter(raw) as file:
            yield file
        draft.replace(real)


@contextmanager
def atomic_writes() -> Iterator[Callable[[Path], Path]]:
    """Write several files: all of them, or none.

    Yields:
        A function: final path -> temporary path to write to. It creates missing folders.

    Raises:
        OSError: a file cannot be written, or exists and is not a regular file. All files and
            folders are then as they were before.
    """
    drafts: dict[Path, Path] = {}
    with ExitStack() as undoing:

        def draft_of(path: Path) -> Path:
            _make_folders(path.parent, undoing)
            real = _end_of_link(path)
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(real.stat().st_mode):
                    raise FileExistsError(errno.EEXIST, f"{real} exists and is not a regular file")
            raw, drafts[real] = undoing.enter_context(_draft(real))
            raw.close()
            return drafts[real]

        yield draft_of
        for real, draft in drafts.items():
            undoing.enter_context(_in_its_place(draft, real))


@contextmanager
def _in_its_place(draft: Path, real: Path) -> Iterator[None]:
    """Rename a draft to its final name. If the `with` body fails, restore the old file."""
    new = draft.stat()
    older = _second_name(real)
    try:
        draft.replace(real)
        yield
    except BaseException:
        if older is not None:
            older.replace(real)
        else:
            remove(real, lambda file: _is_same(file, new))
        raise
    finally:
        if older is not None:  # renaming one name of a file onto its other name does nothing
            older.unlink(missing_ok=True)


def _second_name(path: Path) -> Path | None:
    """Give the file at `path` a second name, and return it; None if there is no file."""
    name = name_beside(path)
    try:
        os.link(path, name)
    except OSError:  # no such file, or no hard links on this disk, or not to another user's file
        try:
            path.rename(name)
        except FileNotFoundError:
            return None
    return name


def _make_folders(folder: Path, undoing: ExitStack) -> None:
    try:
        folder.mkdir()
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_folders(folder.parent, undoing)
        folder.mkdir(exist_ok=True)
    undoing.push(partial(_remove_folder, folder))


def _remove_folder(folder: Path, error: type[BaseException] | None, *_details: object) -> None:
    if error is not None:
        with suppress(OSError):  # another process has put a file into it
            folder.rmdir()


@contextmanager
def _draft(path: Path) -> Iterator[tuple[OwnFile, Path]]:
    """Create a file next to `path`, under a temporary name; removed if the `with` body fails.

    Yields:
        The file, with the permissions of the one that it will replace, and its name.
    """
    name = name_beside(path)
    with ExitStack() as undoing:
        undoing.callback(name.unlink, missing_ok=True)
        file = undoing.enter_context(OwnFile(os.open(name, _NEW, 0o666)))
        with suppress(FileNotFoundError):
            older = path.stat()
            with suppress(PermissionError):
                os.fchown(file.fileno(), older.st_uid, older.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(older.st_mode))
        yield file, name
        undoing.pop_all()


def try_beside(path: Path) -> None:
    """Raise the OSError that `atomic_write` would raise at its start. Opens no existing file."""
    if _descriptor_name(path) is None and (not path.exists() or path.is_file()):
        name = name_beside(_end_of_link(path))
        os.close(os.open(name, _NEW))
        name.unlink()


def name_beside(path: Path) -> Path:
    """A unique name in the folder of `path`."""
    return path.with_name(f".nvtrace-{uuid.uuid4().hex}")


def _is_same(path: Path, meant: stat_result) -> bool:
    return os.path.samestat(path.lstat(), meant)


def _if_same(path: Path, meant: stat_result) -> list[Path]:
    try:
        return [path] if _is_same(path, meant) else []
    except OSError:
        return []


def _end_of_link(path: Path) -> Path:
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _open_special(path: Path) -> int | None:
    """Open what is written to directly: a pipe, a device, an open file like /dev/fd/3.

    It creates and truncates nothing.

    Returns:
        The descriptor. None if it is a regular file, or does not exist.
    """
    name = _descriptor_name(path)
    if name is not None:
        return _open_again(name)
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)  # a regular file has replaced it meanwhile
    return None


def _descriptor_name(path: Path) -> Path | None:
    """The name in /proc/*/fd or /dev/fd that `path` is or links to; None for any other path.

    The file behind it may have another name, or none; that name must not be renamed or replaced.
    """
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(path.parent)
        if _DESCRIPTORS.fullmatch(folder) and path.name.isdecimal():
            return Path(folder, path.name)
        if not path.is_symlink():
            break
        path = Path(folder, path.readlink())
    return None


def _open_again(name: Path) -> int:
    """Open the file behind a name in /proc/*/fd or /dev/fd, at the position of its descriptor.

    A file that another process has opened is appended to.

    Raises:
        OSError: it is not open, or not for writing.
    """
    name.lstat()
    own = (os.path.realpath(folder) for folder in ("/dev/fd", "/proc/thread-self/fd"))
    if str(name.parent) not in own:
        return os.open(name, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
    descriptor = os.dup(int(name.name))
    try:
        os.write(descriptor, b"")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
