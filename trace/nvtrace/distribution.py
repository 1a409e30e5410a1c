"""Distribution: the mean and the percentiles of many whole numbers, in bounded memory.

Equal numbers are one entry with a count. With more than 50,000 different numbers, only the ten
leading bits of each are kept: percentiles are then within 0.1 %, and exact before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

HIGH_FACTOR = 1.2
HIGH_QUARTILES = 5
_MOST_VALUES = 50_000
_KEPT_BITS = 10


@dataclass(frozen=True, slots=True)
class Percentiles:
    """A distribution in a few numbers, all in the unit of its values.

    Attributes:
        count: number of values, at least one.
        mean, min, max: exact.
        p50, p90, p95, p99: percentiles, linear between neighbours (as numpy's and vLLM's are).
    """

    count: int
    mean: float
    min: int
    p50: float
    p90: float
    p95: float
    p99: float
    max: int


class Distribution:
    """Takes in whole numbers from 0 on, in any order."""

    def __init__(self, most_values: int = _MOST_VALUES) -> None:
        self._counts: Counter[int] = Counter()
        self._most_values = most_values
        self._is_rounding = False
        self._count = self._sum = 0
        self._min = self._max = 0

    def add(self, value: int, count: int = 1) -> None:
        """Take in `value`, `count` times."""
        self._min = min(self._min, value) if self._count else value
        self._max = max(self._max, value)
        self._count += count
        self._sum += value * count
        self._counts[_rounded(value) if self._is_rounding else value] += count
        if len(self._counts) > self._most_values and not self._is_rounding:
            self._is_rounding = True
            exact, self._counts = self._counts, Counter()
            for other, times in exact.items():
                self._counts[_rounded(other)] += times

    def spread(self) -> Percentiles | None:
        """The percentiles so far; None if there are no values."""
        if not self._count:
            return None
        values = sorted(self._counts.items())
        p50, p90, p95, p99 = (
            min(max(self._percentile(values, percent), self._min), self._max)
            for percent in (50, 90, 95, 99)
        )
        mean = self._sum / self._count
        return Percentiles(self._count, mean, self._min, p50, p90, p95, p99, self._max)

    def usual_limit(self) -> float | None:
        """The limit above which a value is an outlier; None if there are no values.

        It is the median times HIGH_FACTOR, or, if that is more, the median plus HIGH_QUARTILES
        times the distance from it to the upper quartile.
        """
        if not self._count:
            return None
        values = sorted(self._counts.items())
        p50, p75 = (self._percentile(values, percent) for percent in (50, 75))
        return max(HIGH_FACTOR * p50, p50 + HIGH_QUARTILES * (p75 - p50))

    def _percentile(self, values: list[tuple[int, int]], percent: int) -> float:
        """The value at `percent` of the way from the smallest to the largest."""
        place, hundredths = divmod((self._count - 1) * percent, 100)
        low = _value_at(values, place)
        if not hundredths:
            return low
        return low + (_value_at(values, place + 1) - low) * hundredths / 100


def _value_at(values: list[tuple[int, int]], place: int) -> int:
    num_before = 0
    for value, count in values:
        num_before += count
        if num_before > place:
            return value
    raise IndexError(f"there is no place {place} among {num_before} values")


def _rounded(value: int) -> int:
    """The middle of all numbers that share the leading bits of `value`."""
    num_dropped = value.bit_length() - _KEPT_BITS
    if num_dropped <= 0:
        return value
    return (value >> num_dropped << num_dropped) + (1 << num_dropped - 1)
