"""guarded: an error in an observer must not end the engine's run. It is printed once."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress
from typing import Any

from nanovllm.observer import SILENT, Observer

_UNGUARDED = {"for_workers", "engine_init", "failed"}  # the first two: the run has not begun yet
# With the method's own parameters: with *args each call would cost five times as much.
_GUARD = """
def {name}({parameters}):
    try:
        observer.{name}({arguments})
    except Exception as error:
        fail({name!r}, error)
"""


def guarded(observer: Observer | None) -> Observer:
    """Catch every `Exception` that a method of an observer raises.

    The first one is printed on stderr, and `observer.failed` is called for each. `engine_init` and
    `for_workers` may raise: the run has not begun yet.

    Args:
        observer: None for no observer.

    Returns:
        Another observer, which calls the methods of this one.
    """
    if observer is None or type(observer) is Observer:
        return SILENT
    guards: dict[str, Any] = {}
    failed_before: list[str] = []

    def fail(name: str, error: Exception) -> None:
        with suppress(Exception):  # it may raise as well
            observer.failed(name, error)
        if not failed_before:
            failed_before.append(name)
            _say(f"{type(observer).__name__}.{name}()", error)

    space: dict[str, Any] = {"observer": observer, "fail": fail}
    for name, method in vars(Observer).items():
        if name in _UNGUARDED:
            guards[name] = getattr(observer, name)
        elif not name.startswith("_"):
            names = method.__code__.co_varnames  # its parameters: it has no other variables
            by_name = names[method.__code__.co_argcount :]
            arguments = ", ".join(f"{one}={one}" if one in by_name else one for one in names[1:])
            source = _GUARD.format(name=name, parameters=", ".join(names), arguments=arguments)
            exec(source, space)  # noqa: S102 - made of the names in observer.py
            guards[name] = space[name]
    guard: Observer = type("Guard", (Observer,), guards)()
    return guard


def _say(what: str, error: Exception) -> None:
    with suppress(Exception):  # stderr may be closed, or None
        sys.stderr.write(
            f"{''.join(traceback.format_exception(error))}nanovllm: {what} raised this error. "
            "The run goes on, but the observer's record is incomplete. Fix this method, or run "
            "without the observer. Later errors are not shown.\n"
        )
