"""Exercises that check themselves.

Knows how to ask whether an answer is right, and how to say so. Does not know any answer: each check
asks the trace that its notebook has loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_Answer = TypeVar("_Answer")


def check(answer: _Answer | None, is_right: Callable[[_Answer], object], *, hint: str) -> None:
    """Print whether an answer is right.

    Args:
        answer: what the reader found, a value or a function; None if it was not tried yet. Nor was
            a function that raises NotImplementedError.
        is_right: asked with the answer.
        hint: what to think of if it is wrong.
    """
    print(_verdict(answer, is_right, hint))


def _verdict(answer: _Answer | None, is_right: Callable[[_Answer], object], hint: str) -> str:
    if answer is None:
        return "Try it: put your answer into the cell above, run it, then this one."
    try:
        found_right = bool(is_right(answer))
    except NotImplementedError:
        return "Try it: write the function in the cell above, run it, then this one."
    except Exception as error:  # noqa: BLE001 - whatever a reader's own code raises
        return f"Not yet: it raises {type(error).__name__}: {error}. Think of this: {hint}"
    return "Right." if found_right else f"Not yet: {hint}"
