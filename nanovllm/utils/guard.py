"""guarded: an error in an observer must not end the engine's run. It is printed once."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress
from functools import partial

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


class Guard(Observer):
    """Calls the methods of another observer; see `guarded`.

    Attributes:
        failures: the names of the methods that have raised, in order.
    """

    def __init__(self, observer: Observer) -> None:
        self.failures: list[str] = []
        space = {"observer": observer, "fail": partial(_fail, observer, self.failures)}
        for name, method in vars(Observer).items():
            if name in _UNGUARDED:
                self.__dict__[name] = getattr(observer, name)
            elif not name.startswith("_"):
                code = method.__code__  # its variables are its parameters: it has no others
                names, by_name = code.co_varnames[1:], code.co_varnames[code.co_argcount :]
                arguments = ", ".join(f"{one}={one}" if one in by_name else one for one in names)
                source = _GUARD.format(name=name, parameters=", ".join(names), arguments=arguments)
                exec(source, space, self.__dict__)  # noqa: S102 - made of the names in observer.py


def guarded(observer: Observer | None) -> Observer:
    """Catch every `Exception` that a method of an observer raises.

    The first one is printed on stderr, and `observer.failed` is called for each. `engine_init` and
    `for_workers` may raise: the run has not begun yet.

    Args:
        observer: None for no observer.

    Returns:
        Another observer, which calls the methods of this one.

    Raises:
        TypeError: it is no Observer.
    """
    if observer is None or observer is SILENT:
        return SILENT
    if not isinstance(observer, Observer):
        raise TypeError(
            f"observer must be a nanovllm.Observer, not a {type(observer).__name__}: "
            "make its class a subclass of nanovllm.Observer"
        )
    return Guard(observer)


def _fail(observer: Observer, failures: list[str], name: str, error: Exception) -> None:
    failures.append(name)
    with suppress(Exception):  # it may raise as well
        observer.failed(name, error)
    if len(failures) > 1:
        return
    with suppress(Exception):  # stderr may be closed, or None
        sys.stderr.write(
            f"{''.join(traceback.format_exception(error))}nanovllm: {type(observer).__name__}."
            f"{name}() raised this error. The run goes on, but the observer's record is "
            "incomplete. Fix this method, or run without the observer. Its later errors are not "
            "shown.\n"
        )
