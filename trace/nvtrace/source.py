"""Finding where the engine's source calls the hook of an event.

An event, its struct and its hook have the same name in three spellings (SCHEDULE_PREFILL,
SchedulePrefill, schedule_prefill). The source is searched as text; the engine is not imported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
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
    observer = f"{_PACKAGE}/observer.py"
    found = _find(hook, rf"^    def {hook}\(")
    return next((place for place in found if place.file == observer), None)


def calls_of(hook: str) -> list[Place]:
    """Every place where the engine calls the method."""
    return _find(hook, rf"\bobserver\.{hook}\(")


def _find(hook: str, pattern: str) -> list[Place]:
    expression = re.compile(pattern)
    return [
        Place(file, number)
        for file, lines in _source().items()
        for number, line in enumerate(lines, start=1)
        if hook in line and expression.search(line)
    ]


@cache
def _source() -> dict[str, list[str]]:
    """The engine's files: name -> lines. Read once, since every event is searched for in them."""
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return {}
    root = Path(spec.submodule_search_locations[0])
    return {
        f"{_PACKAGE}/{path.relative_to(root).as_posix()}": path.read_text("utf-8").splitlines()
        for path in sorted(root.rglob("*.py"))
    }
