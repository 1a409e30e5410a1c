"""Cells: the values of one field, collected into one column while events are decoded.

Numbers are kept as machine numbers and codes as small integers. (Reading the fields of a million
event objects later would take longer than decoding them.)
"""

from __future__ import annotations

from array import array
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Protocol, Union, get_args, get_origin

import numpy as np
import pandas as pd

from nvtrace.analysis.frames import FrameError, masked
from nvtrace.events import codes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERS = {int: np.int64, float: np.float64, bool: np.bool_}
_NOT_THERE = -(2**63)  # stands for None


class Cells(Protocol):
    """A column to which values are added."""

    def extend(self, values: Sequence[Any]) -> None:
        """Add values.

        Raises:
            FrameError: one of them is too large.
        """

    def column(self) -> Any:  # noqa: ANN401 - an array
        """The values, as a DataFrame's column takes them."""


def cells_of(name: str, annotation: Any) -> Cells:  # noqa: ANN401 - any annotation
    """An empty column.

    Args:
        name: of the field, with its event's, for errors.
        annotation: of the field.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if known := codes_of(annotation):
        return _Codes(known)
    if name.endswith(".seed"):
        return _Numbers(name, np.uint64)  # a seed has all 64 bits
    is_optional = origin in {Union, UnionType}
    kind = next(part for part in arguments if part is not NoneType) if is_optional else annotation
    if kind is int and (is_optional or name.endswith(".step")):
        return _OptionalInts(name)
    if kind in _NUMBERS and not is_optional:
        return _Numbers(name, _NUMBERS[kind])
    return _Objects("str" if kind is str else "object")


class _Numbers:
    """Numbers without None."""

    def __init__(self, name: str, dtype: type[np.generic]) -> None:
        self._name = name
        self._dtype = dtype
        self._parts = [np.empty(0, dtype)]

    def extend(self, values: Sequence[Any]) -> None:
        try:
            self._parts.append(np.fromiter(values, self._dtype, len(values)))
        except OverflowError as error:
            raise FrameError(
                f"{self._name} holds a number beyond 64 bits: `nvtrace validate` and `nvtrace "
                "check` say what is wrong with the trace"
            ) from error

    def column(self) -> Any:  # noqa: ANN401 - an array
        return np.concatenate(self._parts)


class _OptionalInts(_Numbers):
    """Integers, or None."""

    def __init__(self, name: str) -> None:
        super().__init__(name, np.int64)

    def extend(self, values: Sequence[Any]) -> None:
        if None in values:
            values = [_NOT_THERE if value is None else value for value in values]
        super().extend(values)

    def column(self) -> Any:  # noqa: ANN401 - an array
        data = np.concatenate(self._parts)
        return masked(data, data != _NOT_THERE)


class _Codes:
    """Codes: the known ones first, then the others."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self._codes = {word: code for code, word in enumerate(words)}
        self._held = array("i")

    def extend(self, values: Sequence[Any]) -> None:
        for word in {*values} - self._codes.keys():
            self._codes[word] = len(self._codes)
        self._held.extend(map(self._codes.__getitem__, values))

    def column(self) -> pd.Categorical:
        return pd.Categorical.from_codes(
            np.frombuffer(self._held, np.int32), categories=[*self._codes]
        )


class _Objects:
    """Anything else: text, lists; NaN stands for None, as pandas has it for text and codes."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._held: list[Any] = []

    def extend(self, values: Sequence[Any]) -> None:
        self._held += [np.nan if value is None else value for value in values]

    def column(self) -> Any:  # noqa: ANN401 - an array
        if self._dtype == "str":
            return pd.array(self._held, dtype="str")
        cells = np.empty(len(self._held), object)
        cells[:] = self._held  # np.array would make a matrix of lists of one length
        return cells
