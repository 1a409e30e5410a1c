"""Checks of single option values: one sentence for each way to be wrong, naming the option.

Knows types and ranges. Does not know what an option means. Numbers of other libraries (numpy's,
fractions) are taken for what they are and become Python's.
"""

from __future__ import annotations

from numbers import Integral, Real


def whole_number(name: str, value: object, *, at_least: int, below: int) -> int:
    """Return `value` as an int.

    Raises:
        TypeError: it is no whole number (5.0 and True are none).
        ValueError: it is not in [at_least, below).
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    number = int(value)
    if not at_least <= number < below:
        limit = f" and below 2**{below.bit_length() - 1}" if number >= below else ""
        raise ValueError(f"{name} must be at least {at_least}{limit}, not {number}")
    return number


def real_number(name: str, value: object, *, low: float, high: float, with_low: bool) -> float:
    """Return `value` as a float.

    Raises:
        TypeError: it is no number (True and "0.6" are none).
        ValueError: it is not in [low, high], or equals `low` where that does not belong to it.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not low <= number <= high or (number == low and not with_low):
        interval = f"{'[' if with_low else '('}{low:g}, {high:g}]"
        raise ValueError(f"{name} must be in {interval}, not {value!s:.40}")
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
    return value
