"""Frames: values -> DataFrames with the documented columns (`columns.py`)."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from nvtrace.analysis.columns import Frame


class FrameError(ValueError):
    """A value of the trace does not fit its column."""


def frame_of(frame: Frame, values: Mapping[str, Any]) -> pd.DataFrame:
    """A documented DataFrame, with its columns in their order and with their dtypes.

    Args:
        frame: its columns.
        values: for each column a list, an array or a Series.

    Raises:
        FrameError: a value does not fit the column's dtype.
    """
    columns = {}
    for column in frame.columns:
        try:
            with np.errstate(invalid="ignore"):  # a value that does not fit is an error below
                series = pd.Series(values[column.name], copy=False)
                columns[column.name] = series.astype(column.dtype)
        except (OverflowError, TypeError, ValueError) as error:
            raise FrameError(
                f"{frame.name}.{column.name} is not {column.dtype}: {error}"
            ) from error
    return pd.DataFrame(columns, copy=False)


def masked(data: npt.NDArray[Any], is_there: npt.NDArray[np.bool_]) -> Any:  # noqa: ANN401 - an array
    """A nullable column of numbers: NA where `is_there` is False."""
    kinds = {"i": pd.arrays.IntegerArray, "f": pd.arrays.FloatingArray, "b": pd.arrays.BooleanArray}
    return kinds[data.dtype.kind](data, ~is_there)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switch the collector off: with a million new objects, and no cycles, it doubles the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def of_first_rank(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the rank that decides."""
    return frame[frame["rank"] == frame["rank"].min()].reset_index(drop=True)
