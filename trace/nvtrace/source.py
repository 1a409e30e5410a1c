"""Finding where the engine's source calls the hook of an event.

An event, its struct and its hook have the same name in three spellings (SCHEDULE_PREFILL,
SchedulePrefill, schedule_prefill). The source is searched as text; the engine is not imported.
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
        file: with the package, for example "nanovllm/engine/scheduler.py".
        line: from 1.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def hook_of(tag: str) -> str:
    """The observer method of an event."""
    return tag.lower()


def definition_of(hook: str) -> Place | None:
    """Where the observer defines the method."""
    return next(iter(_find(rf"^    def {hook}\(", ("observer.py",))), None)


def calls_of(hook: str) -> list[Place]:
    """Every place where the engine calls the method."""
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
