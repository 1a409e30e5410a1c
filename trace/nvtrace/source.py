"""Where the engine's source says an event.

Knows that an event's name, its struct and the observer's method are one word in three spellings
(SCHEDULE_PREFILL, SchedulePrefill, schedule_prefill), and where the package's files lie. Reads them
as text: nothing of the engine is imported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_PACKAGE = "nanovllm"


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the engine's source.

    Attributes:
        file: as the package names it, for example "nanovllm/engine/scheduler.py".
        line: counted from 1.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def hook_of(tag: str) -> str:
    """The observer's method behind an event."""
    return tag.lower()


def definition_of(hook: str) -> Place | None:
    """Where the observer declares the method."""
    return next(iter(_find(rf"^    def {hook}\(", ("observer.py",))), None)


def calls_of(hook: str) -> list[Place]:
    """Every place where the engine says it."""
    return _find(rf"\bobserver\.{hook}\(", ("**/*.py",))


def _find(pattern: str, globs: tuple[str, ...]) -> list[Place]:
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(spec.submodule_search_locations[0])
    expression = re.compile(pattern)
    return [
        Place(f"{_PACKAGE}/{path.relative_to(root).as_posix()}", number)
        for glob in globs
        for path in sorted(root.glob(glob))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if expression.search(line)
    ]
