"""Where a command's file may go.

Knows `--out`. Does not know what is written. Imports nothing heavy: every command's `--help` loads
it.
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
    """Refuse a file that cannot be one.

    Raises:
        UsageError: a folder, a folder that is not there, or a name that no file can have.
    """
    try:
        os.lstat(out)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name that is too long, say
        raise UsageError(f"--out {out}: {error.strerror}") from error
    if out.is_dir():
        raise UsageError(f"--out {out}: it is a folder, give a file in it")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")


def refuse_streams(out: Path, what: str) -> None:
    """Refuse what stdout or stderr go to, by whatever name: one would overwrite the other.

    Args:
        out: "-" is stdout.
        what: would be written, as "a trace".

    Raises:
        UsageError: for this reason.
    """
    for descriptor, why in _STREAMS.items():
        if is_stream(out, descriptor):
            raise UsageError(f"--out {out}: {what} needs a file of its own, because {why}")


def is_stream(out: Path, descriptor: int) -> bool:
    """Does this standard stream go to `out`, where what is written to both would be mixed up?

    Devices other than terminals (the null device, say) keep nothing to mix up.
    """
    if str(out) == "-":
        return descriptor == 1
    with suppress(OSError):  # a stream may be closed, and `out` need not be there
        there = out.stat()
        is_kept = not stat.S_ISCHR(there.st_mode) or os.isatty(descriptor)
        return is_kept and os.path.samestat(there, os.fstat(descriptor))
    return False


def is_input(out: Path, file: str) -> bool:
    """Is `out` what is read, by whatever name? "-" is stdin."""
    with suppress(OSError):  # stdin may be closed, and neither need be there
        given = os.fstat(0) if file == "-" else Path(file).stat()
        return os.path.samestat(out.stat(), given)
    return False


def prove_writable(out: Path) -> None:
    """Find out now whether a plain file can be written there, not after the work of minutes.

    Raises:
        UsageError: it cannot.
    """
    from nvtrace.files import try_beside  # noqa: PLC0415 - --help needs no files

    with writing(out, UsageError):
        try_beside(out)


@contextmanager
def writing(out: Path, failure: type[CommandError]) -> Iterator[None]:
    """The disk's own errors in a sentence; those of the trace are the reader's."""
    try:
        yield
    except OSError as error:
        raise failure(f"{out} cannot be written ({error.strerror or error})") from error
