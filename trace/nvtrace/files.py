"""Files that this process makes, and nobody else's.

A name can change hands between a look at it and a deed. So nothing here looks at a name, then acts:

    make       a file is made under a name that nobody has (O_EXCL)
    taken      what has a name is renamed into a folder of our own, and looked at there
    give       a file gets a name by a link, which replaces nothing
    written    a file is written under a name that nobody has, then renamed to its own

Links are followed: the file that a link leads to is kept or replaced, and the link stays. A pipe, a
device and what a name like /dev/fd/3 stands for are written straight.

Knows names and descriptors. Does not know what is in a file.
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
_LOOKS = 500  # for a file of ours that somebody else is renaming
_MOST_LINKS = 40  # that lead on from one name: Linux follows as many
_DESCRIPTORS = re.compile(r"/proc/\d+(/task/\d+)?/fd|/dev/fd")  # folders of open files


class OwnFile(io.FileIO):
    """An unbuffered file, open for writing. A fork of its process writes nothing into it."""

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
class Made:
    """A file that is being written, told by its descriptor, whatever others do with its name.

    Attributes:
        file: open for writing.
        path: where it was made; None for what is written straight, which was there before.
        kept: where an older file is now that had this path.
        older: which file that is.
    """

    file: OwnFile
    path: Path | None
    kept: Path | None = None
    older: stat_result | None = None

    def names(self) -> list[Path]:
        """The names that the file has now, in its folder; somebody else may have renamed it.

        If it has none there, the one that it was moved to, where the system tells that.
        """
        for _ in range(_LOOKS):
            names = self._names_now()
            if self.path is None or names or not os.fstat(self.file.fileno()).st_nlink:
                break
            time.sleep(_SECONDS_BETWEEN_LOOKS)  # it has no name here while somebody renames it
        return sorted(names, key=lambda name: name != self.path) or self._name_elsewhere()

    def _name_elsewhere(self) -> list[Path]:
        descriptor = self.file.fileno()
        with suppress(OSError):  # only Linux tells it
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
            names = names or _if_same(self.path, own)  # the folder may not be read
        return names

    def undo(self) -> bool:
        """Remove the file, and let the older one have its name back if nobody else has it now.

        Returns:
            Whether an older one has its name back.
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


def make(path: Path, existing: Existing) -> Made:
    """Make a file for writing, or open the pipe or the device that is there.

    Args:
        path: its folder must exist.
        existing: what to do with a file that is there: "keep" renames it, "replace" puts the new
            one in its place, "error" raises FileExistsError.

    Raises:
        OSError: it cannot be made.
    """
    kept: tuple[Path | None, stat_result | None] = (None, None)
    while True:
        special = _open_special(path)
        if special is not None:
            return Made(OwnFile(special), None)
        real = _end_of_link(path)
        if existing == "replace":
            with _draft(real) as (file, draft):
                draft.replace(real)
            return Made(file, real)
        try:
            return Made(OwnFile(os.open(real, _NEW, 0o666)), real, *kept)
        except FileExistsError as error:
            if existing == "error":
                raise FileExistsError(f"{path} exists: give another file") from error
        with taken(real) as found:
            if found is not None and is_plain(found):
                older = found.lstat()
                kept = give(found, free_names(real)), older


def reopened(path: Path, meant: stat_result) -> Made | None:
    """A file that another process of this run has made at `path`, opened here; None if it is gone.

    Args:
        path: where it was made; somebody may have renamed it.
        meant: which file it is.
    """
    for name in chain([path], path.parent.iterdir()):
        if _if_same(name, meant):
            with suppress(FileNotFoundError):
                file = OwnFile(os.open(name, os.O_WRONLY))
                if os.path.samestat(os.fstat(file.fileno()), meant):
                    return Made(file, path)
                file.close()
    return None


def free_names(path: Path) -> Iterator[Path]:
    """trace.1.jsonl, trace.2.jsonl ...: names to be tried, which others may have."""
    stem, dot, endings = path.name.partition(".")
    return (path.with_name(f"{stem}.{number}{dot}{endings}") for number in count(1))


def is_plain(path: Path) -> bool:
    """Is this a plain file, and no link to one either?"""
    return stat.S_ISREG(path.lstat().st_mode)


def move(path: Path, names: Iterable[Path], is_meant: Callable[[Path], bool]) -> Path | None:
    """Give what is at `path` the first of `names` that nobody has.

    Args:
        path: where it is; links are not followed.
        names: in its folder.
        is_meant: looks at it: where it is, and again where nobody else can reach it.

    Returns:
        The new name. None if nothing has moved: nothing is there, it is not meant, or others have
        all names.
    """
    with _taken_if(path, is_meant) as file:
        return None if file is None else give(file, names)


def remove(path: Path, is_meant: Callable[[Path], bool]) -> None:
    """Remove what is at `path`, if it is meant; see `move`."""
    with _taken_if(path, is_meant) as file:
        if file is not None:
            file.unlink()


@contextmanager
def _taken_if(path: Path, is_meant: Callable[[Path], bool]) -> Iterator[Path | None]:
    try:
        is_there = is_meant(path)
    except FileNotFoundError:
        is_there = False
    if not is_there:
        yield None
        return
    with taken(path) as file:
        yield file if file is not None and is_meant(file) else None


@contextmanager
def taken(path: Path) -> Iterator[Path | None]:
    """What is at `path`, in a folder of our own; None if nothing is.

    What is still there at the end gets its name back, or a free one if somebody took it meanwhile.
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
        if os.path.lexists(file):  # nobody else can reach it
            give(file, chain([path], free_names(path)))
        folder.rmdir()


def give(file: Path, names: Iterable[Path]) -> Path | None:
    """Give a file that nobody else can reach the first of `names` that nobody has.

    Returns:
        The name, or None if others have all of them.

    Raises:
        OSError: a name cannot be given, for another reason.
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
    except OSError:  # no links on this disk, or not to another user's file
        os.close(os.open(name, _NEW))
        file.replace(name)
    else:
        file.unlink()


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file to write `path` anew: what is there stays as it is until the new one is whole.

    The new file has the old one's permissions. A pipe or a device is written straight.

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
def together() -> Iterator[Callable[[Path], Path]]:
    """Write several files: all of them, or none.

    Yields:
        A function: the path to write to, for what will be at the path that it is given. Folders
        that are missing are made.

    Raises:
        OSError: a file cannot be written, or is there and is not a plain file. All files and
            folders are then what they were.
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
    """Rename a draft to its own name. If the block fails, what was there comes back."""
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
        if older is not None:  # a rename leaves both names of one file
            older.unlink(missing_ok=True)


def _second_name(path: Path) -> Path | None:
    """Another name for what is at `path`; None if nothing is."""
    name = name_beside(path)
    try:
        os.link(path, name)
    except OSError:  # nothing is there, or no links on this disk, or not to another user's file
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
        with suppress(OSError):  # somebody put something into it
            folder.rmdir()


@contextmanager
def _draft(path: Path) -> Iterator[tuple[OwnFile, Path]]:
    """A new file beside `path`, under a name that nobody has; removed if the block fails.

    Yields:
        The file, with the permissions of the one that it is to replace, and its name.
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
    """Raise the OSError that `written` would raise at its start. Opens nothing that is there."""
    if _descriptor_name(path) is None and (not path.exists() or path.is_file()):
        name = name_beside(_end_of_link(path))
        os.close(os.open(name, _NEW))
        name.unlink()


def name_beside(path: Path) -> Path:
    """A name in the folder of `path` that nobody has."""
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
    """Open what is written straight: a pipe, a device, an open file that /dev/fd/3 stands for.

    Nothing is made or made shorter by it.

    Returns:
        The descriptor. None if it is a plain file, or if nothing is there.
    """
    name = _descriptor_name(path)
    if name is not None:
        return _open_again(name)
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)  # a plain file took its place
    return None


def _descriptor_name(path: Path) -> Path | None:
    """The name in /proc/*/fd or /dev/fd that `path` is, or leads to; None for any other path.

    The file behind it may have another name, or none: what is done to that name is not meant.
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
    """Open what a name in /proc/*/fd or /dev/fd stands for: to write where its owner would.

    Another process's is written at its end.

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
