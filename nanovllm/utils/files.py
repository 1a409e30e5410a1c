"""Opening the files of a model folder, with an error that says why one cannot be read.

Handled are broken and circular links, folders, pipes, names that are too long, missing permissions.
"""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from nanovllm.errors import NanoVLLMError

POINTERS = {  # the first bytes of a small text file that replaces a large file
    b"version https://git-lfs.github.com/spec/v1": "a Git LFS pointer: run `git lfs pull`",
    b"/annex/objects/": "a git-annex pointer: run `git annex get .`",
}
_BYTE_ORDER_MARKS = b"\xef\xbb\xbf\xfe\xff"  # some editors and shells write them first


def is_there(path: Path) -> bool:
    """Does the folder have an entry of this name? True if unknown: opening it gives the error."""
    try:
        path.lstat()  # a broken link is there too: it must not be ignored
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def check_file(file: Path, refusal: type[NanoVLLMError]) -> None:
    """Raise `refusal` if `file` cannot be opened and read, or is only a pointer to the real one."""
    try:
        mode = file.stat().st_mode  # of the target, if it is a link
        if stat.S_ISREG(mode):
            with file.open("rb") as opened:
                begin = opened.read(128).replace(b"\0", b"").lstrip(_BYTE_ORDER_MARKS)
            pointers = [what for mark, what in POINTERS.items() if begin.startswith(mark)]
            if not pointers:
                return
            why = f"it is {pointers[0]} in its folder, or download the file"
        else:  # opening a pipe would block until someone writes to it
            why = "it is a folder" if stat.S_ISDIR(mode) else "it is not a regular file"
    except (OSError, ValueError) as error:
        why = explain(error, file)
    raise refusal(f"{file} cannot be read: {why}.")


def read_json(file: Path, refusal: type[NanoVLLMError]) -> object:
    """Return the content of a JSON file. Raises `refusal` if it cannot be read or is not JSON."""
    check_file(file, refusal)
    try:
        content: object = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise refusal(f"{file} cannot be read: {explain(error, file)}.") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deep
        raise refusal(f"{file} is not valid JSON: {error}.") from error
    return content


def explain(error: OSError | ValueError, path: Path) -> str:
    """Return why `path` cannot be used, in a few words: "Permission denied", say."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    is_link = os.path.islink(path)  # noqa: PTH114 - Path.is_symlink raises for a name too long
    return f"{why} (it is a link to {path.readlink()})" if is_link else why
