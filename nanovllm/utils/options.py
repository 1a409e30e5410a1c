"""Checks of single option values. Each error names the option.

Numbers, strings and arrays of other libraries (numpy, fractions, subclasses of Python's own types)
are accepted and converted: these functions return int, float, bool, str or tuple, no subclasses.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

_MOST_BITS_SHOWN = 128


def whole_number(name: str, value: object, *, at_least: int, below: int) -> int:
    """Return `value` as an int.

    Raises:
        TypeError: it is not a whole number (5.0 and True are not).
        ValueError: it is not in [at_least, below).
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    number = int(value)
    if not at_least <= number < below:
        limit = f" and below 2**{below.bit_length() - 1}" if number >= below else ""
        raise ValueError(f"{name} must be at least {at_least}{limit}, not {_shown(number)}")
    return number


def optional(name: str, value: object, *, at_least: int, below: int) -> int | None:
    """Return `value` as an int; None for the values that turn it off: None, -1 to at_least - 1.

    Raises:
        TypeError, ValueError: as `whole_number`.
    """
    number = -1 if value is None else whole_number(name, value, at_least=-1, below=below)
    return number if number >= at_least else None


def whole_numbers(name: str, value: object) -> tuple[int, ...]:
    """Return `value`, a list of whole numbers from 0 on, as a tuple; () for None.

    Raises:
        TypeError: it is not a list, or an item is not a whole number.
        ValueError: an item is negative, or 2**31 or more.
    """
    wrong = f"{name} must be a list of whole numbers from 0 on, not {value!r}"
    if value is None:
        return ()
    found = as_list(value)
    if found is None:
        raise TypeError(wrong)
    try:
        return tuple(whole_number(name, each, at_least=0, below=2**31) for each in found)
    except (TypeError, ValueError) as error:
        raise type(error)(wrong) from None


def texts(name: str, value: object) -> tuple[str, ...]:
    """Return `value`, a string or a list of strings, as a tuple; () for None.

    Raises:
        TypeError: it is neither.
        ValueError: an item is empty, and so part of every text.
    """
    wrong = f"{name} must be a string or a list of strings, none of them empty, not {value!r}"
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else as_list(value)
    if found is None or not all(isinstance(text, str) for text in found):
        raise TypeError(wrong)
    plain = tuple(map(str.__str__, found))
    if not all(plain):
        raise ValueError(wrong)
    return plain


def real_number(name: str, value: object, *, low: float, high: float, with_low: bool) -> float:
    """Return `value` as a float.

    Raises:
        TypeError: it is not a number (True and "0.6" are not).
        ValueError: it is not in [low, high], or it equals `low` without `with_low`.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not low <= number <= high or (number == low and not with_low):
        interval = f"{'[' if with_low else '('}{low:g}, {high:g}]"
        raise ValueError(f"{name} must be in {interval}, not {_shown(value)}")
    return number


def truth(name: str, value: object) -> bool:
    """Return `value`, which is True or False, or raise TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return `value`, which is one of `choices`, or raise TypeError or ValueError."""
    message = f"{name} must be one of {', '.join(choices)}, not {value!r}"
    if not isinstance(value, str):
        raise TypeError(message)
    if value not in choices:
        raise ValueError(message)
    return str.__str__(value)


def token_ids(value: list[Any], vocab_size: int) -> list[int]:
    """Return `value` as token ids of a vocabulary.

    Raises:
        TypeError: an item is not a whole number.
        ValueError: an id is outside the vocabulary.
    """
    # A prompt may have 100,000 tokens: check them one by one only to find the wrong one.
    if set(map(type, value)) <= {int} and (
        not value or (min(value) >= 0 and max(value) < vocab_size)
    ):
        return value
    for token_id in value:
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            raise TypeError(f"a token id must be an int, not {token_id!r}")
        if not 0 <= int(token_id) < vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary [0, {vocab_size})")
    return [*map(int, value)]


def prompt_text(value: str) -> str:
    """Return `value`, or raise ValueError: Python's strings can hold half a surrogate pair."""
    text = str.__str__(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt is not valid Unicode at character {error.start}: half a surrogate pair, "
            "which comes from bytes decoded with errors='surrogateescape'"
        ) from None
    return text


def as_list(value: object) -> list[Any] | None:
    """Return a list, a tuple or an array (numpy's, torch's) as a list; None for anything else."""
    found = value.tolist() if hasattr(value, "tolist") else value
    return list(found) if isinstance(found, (list, tuple)) else None


def _shown(value: object) -> str:
    """A number as text. Python refuses to convert one with thousands of digits."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS_SHOWN:
        return f"a number of {value.bit_length()} bits"
    return f"{value!s:.40}"
