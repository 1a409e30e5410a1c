"""Names that scripts for vLLM and nano-vllm use and this engine does not have (`vllm_names.toml`).

An option whose value changes nothing is accepted. Any other is an error that says what to write
instead.
"""

from __future__ import annotations

import tomllib
from functools import wraps
from inspect import signature
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

T = TypeVar("T")
NAMES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text("utf-8")
)


def no_such(what: str, name: str, own: Collection[str]) -> str:
    """Return a message: there is no such name, and what to write instead, or which names exist."""
    instead = NAMES["instead"].get(name, f"it has: {', '.join(own)}")
    return f"{what} {name!r}; {instead}"


def own_options(what: str, options: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Return the options in `own`. Options of vLLM whose value changes nothing are left out.

    Raises:
        TypeError: any other option is not in `own`.
    """
    for name in (name for name in options if name not in own):
        value, off = options[name], NAMES["changes_nothing"].get(name)
        if off is None or not (value is None or (isinstance(value, Real) and value in off)):
            raise TypeError(no_such(f"{what} has no option", name, own))
    return {name: value for name, value in options.items() if name in own}


def accepts_vllm_options(*methods: str) -> Callable[[type[T]], type[T]]:
    """Decorate a class: `methods` accept vLLM's options, and a missing attribute gives advice."""

    def missing(self: object, name: str) -> NoReturn:
        own = [each for each in dir(type(self)) if not each.startswith("_")]
        raise AttributeError(no_such(f"{type(self).__name__} has no", name, own))

    def taking(function: Callable[..., Any]) -> Callable[..., Any]:
        what = function.__qualname__.replace(".__init__", "")
        own = [*signature(function).parameters][1:]

        @wraps(function)
        def call(*args: object, **options: object) -> object:
            return function(*args, **own_options(f"{what}()", options, own))

        return call

    def decorate(cls: type[T]) -> type[T]:
        own = {name: taking(vars(cls)[name]) for name in methods}
        for name, function in {"__getattr__": missing, **own}.items():
            setattr(cls, name, function)
        return cls

    return decorate
