"""Checks of `--out`: where a command may write its file.

Imports nothing heavy: every command's `--help` loads it.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nvtrace_cli.failures import CommandError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_STREAMS = {1: "answers go to stdout", 2: "messages go to stderr"}


def check_out(out: Path) -> None:
    """Refuse a path that cannot be a file.

    Raises:
        UsageError: it is a folder, its folder does not exist, or no file can have such a name.
    """
    try:
        os.lstat(out)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # for example, the name is too long
        raise UsageError(f"--out {out}: {error.strerror}") from error
    if out.is_dir():
        raise UsageError(f"--out {out}: it is a folder, give a file in it")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")


def refuse_streams(out: Path, what: str) -> None:
    """Refuse the file that stdout or stderr is redirected to: one would overwrite the other.

    Args:
        out: "-" is stdout.
        what: what would be written, for example "a trace".

    Raises:
        UsageError: it is that file.
    """
    for descriptor, why in _STREAMS.items():
        if is_stream(out, descriptor):
            raise UsageError(f"--out {out}: {what} needs a file of its own, because {why}")


def is_stream(out: Path, descriptor: int) -> bool:
    """Does this standard stream write to the file `out`?

    Devices other than terminals (for example the null device) do not count.
    """
    if str(out) == "-":
        return descriptor == 1
    with suppress(OSError):  # the stream may be closed, and `out` may not exist
        there = out.stat()
        is_kept = not stat.S_ISCHR(there.st_mode) or os.isatty(descriptor)
        return is_kept and os.path.samestat(there, os.fstat(descriptor))
    return False


def is_input(out: Path, file: str) -> bool:
    """Is `out` the same file as the input? "-" is stdin."""
    with suppress(OSError):  # stdin may be closed, and the files may not exist
        given = os.fstat(0) if file == "-" else Path(file).stat()
        return os.path.samestat(out.stat(), given)
    return False


def prove_writable(out: Path) -> None:
    """Find out before the work whether a file can be written there.

    Raises:
        UsageError: it cannot.
    """
    from nvtrace.files import try_beside  # noqa: PLC0415 - --help needs no files

    with writing(out, UsageError):
        try_beside(out)


@contextmanager
def writing(out: Path, failure: type[CommandError]) -> Iterator[None]:
    """Turn errors of the disk into a message; errors of the trace are left to the reader."""
    try:
        yield
    except OSError as error:
        raise failure(f"{out} cannot be written ({error.strerror or error})") from error
