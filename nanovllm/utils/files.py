"""The files of a model folder: opened, or refused with a sentence that says what is in the way.

Knows what a file system can answer: links that lead nowhere or in a circle, folders, pipes, names
that are too long, what may not be read. Does not know what a file should hold.
"""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from nanovllm.errors import NanoVLLMError

POINTERS = {  # what begins a text that stands in a large file's place
    b"version https://git-lfs.github.com/spec/v1": "a Git LFS pointer: run `git lfs pull`",
    b"/annex/objects/": "a git-annex pointer: run `git annex get .`",
}
_BYTE_ORDER_MARKS = b"\xef\xbb\xbf\xfe\xff"  # an editor or a shell puts them before a text


def is_there(path: Path) -> bool:
    """Has the folder such a name? Yes where it cannot be told: opening it will say why not."""
    try:
        path.lstat()  # a link that leads nowhere is there: it must not be passed over
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def check_file(file: Path, refusal: type[NanoVLLMError]) -> None:
    """Raise `refusal` if `file` cannot be opened and read, or only says where it is to be had."""
    try:
        mode = file.stat().st_mode  # of what a link leads to
        if stat.S_ISREG(mode):
            with file.open("rb") as opened:
                begin = opened.read(128).replace(b"\0", b"").lstrip(_BYTE_ORDER_MARKS)
            pointers = [what for mark, what in POINTERS.items() if begin.startswith(mark)]
            if not pointers:
                return
            why = f"it is {pointers[0]} in its folder, or download the file"
        else:  # a pipe would wait for somebody to write, so it is not opened
            why = "it is a folder" if stat.S_ISDIR(mode) else "it is not a regular file"
    except (OSError, ValueError) as error:
        why = explain(error, file)
    raise refusal(f"{file} cannot be read: {why}.")


def read_json(file: Path, refusal: type[NanoVLLMError]) -> object:
    """Return what a JSON file holds. Raises `refusal` if it cannot be read, or is no JSON."""
    check_file(file, refusal)
    try:
        content: object = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise refusal(f"{file} cannot be read: {explain(error, file)}.") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise refusal(f"{file} is not valid JSON: {error}.") from error
    return content


def explain(error: OSError | ValueError, path: Path) -> str:
    """Return why `path` cannot be used, in a few words: "Permission denied", say."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    is_link = os.path.islink(path)  # noqa: PTH114 - Path.is_symlink raises for a name too long
    return f"{why} (it is a link to {path.readlink()})" if is_link else why
