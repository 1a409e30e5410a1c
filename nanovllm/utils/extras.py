"""Which extra of this distribution brings a package that is missing, and how to say so."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_EXTRAS = dict.fromkeys(("torch", "transformers", "safetensors", "tokenizers"), "engine")
_EXTRAS |= dict.fromkeys(("pandas", "numpy"), "frames") | {"matplotlib": "notebooks"}


def install_advice(module: str | None) -> str | None:
    """What to install when this module is missing; None if no extra of this package brings it."""
    package = (module or "").partition(".")[0]
    if package not in _EXTRAS:
        return None
    command = f"pip install 'nanovllm-nvtrace[{_EXTRAS[package]}]'"
    return f"this needs {package}, which is not installed: {command}"


def with_advice(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The same error; if an extra brings what is missing, it says which."""
    advice = install_advice(error.name)
    return error if advice is None else ModuleNotFoundError(advice, name=error.name)


@contextmanager
def advising() -> Iterator[None]:
    """Import something, with advice if it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise with_advice(error) from error
