"""Step times: how long a step of a given shape takes, learned from the steps of a trace.

    time = a + b * tokens + c * context + d * sequences        one such line for each phase

The line is fitted by least squares. A predicted time is an estimate and is shown as simulated. The
error is measured on steps that the fit has not used: every fifth step is left out in turn and
predicted from the rest. For shapes more than 10 % outside the recorded ones nothing is predicted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Matrix = list[list[float]]

Phase = Literal["prefill", "decode", "mixed"]
Quantity = Literal["num_tokens", "num_context_tokens", "num_seqs"]

QUANTITIES: tuple[Quantity, ...] = ("num_tokens", "num_context_tokens", "num_seqs")
MARGIN = 0.1  # outside the recorded shapes
_NUM_FOLDS = 5
_STEPS_PER_TERM = 5  # with fewer, the line would only repeat them
_COLLINEAR = 1e-9  # a column with less left is a sum of the others


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes.

    Attributes:
        phase: its kind.
        num_tokens: tokens computed.
        num_context_tokens: tokens attended to: each sequence's length up to its last computed one.
        num_seqs: sequences in the batch.
    """

    phase: Phase
    num_tokens: int
    num_context_tokens: int
    num_seqs: int


@dataclass(frozen=True, slots=True)
class OutOfRange:
    """Why a shape has no time: it is unlike all that were recorded.

    Attributes:
        phase: the step's kind.
        quantity: what is out of range; None if no step of this kind was recorded.
        value: how much of it the step has.
        low, high: the range that was recorded.
    """

    phase: Phase
    quantity: Quantity | None = None
    value: int = 0
    low: int = 0
    high: int = 0


@dataclass(frozen=True, slots=True)
class PhaseFit:
    """The line of one phase.

    Attributes:
        num_steps: steps that it is fitted to.
        coefficients: ns, and ns per unit of each of QUANTITIES; 0 for one that depends on others.
        ranges: the recorded (low, high) of each of QUANTITIES.
        fastest_ns: the fastest recorded step; no prediction is smaller.
        r_squared: the share of the times' variance that it predicts for steps left out of the fit;
            None if all times are equal, or if there are too few steps.
        median_error: of these steps, the median of |predicted - recorded| / recorded; None if there
            are too few.
    """

    num_steps: int
    coefficients: tuple[float, ...]
    ranges: tuple[tuple[int, int], ...]
    fastest_ns: int
    r_squared: float | None
    median_error: float | None


class StepTimes:
    """Predicts the time of a step.

    Args:
        steps: shapes that were recorded, each with its time in nanoseconds.
        between_ns: the time between two steps.
    """

    def __init__(self, steps: Iterable[tuple[StepShape, int]], between_ns: int = 0) -> None:
        by_phase: defaultdict[Phase, list[tuple[StepShape, int]]] = defaultdict(list)
        for shape, wall_ns in steps:
            by_phase[shape.phase].append((shape, wall_ns))
        self.between_ns = between_ns
        self.fits = {phase: _fit(its_steps) for phase, its_steps in by_phase.items()}

    def predict(self, shape: StepShape) -> int | OutOfRange:
        """The time of a step in nanoseconds, or why it cannot be predicted."""
        fit = self.fits.get(shape.phase)
        if fit is None:
            return OutOfRange(shape.phase)
        for quantity, (low, high) in zip(QUANTITIES, fit.ranges, strict=True):
            value = getattr(shape, quantity)
            if not low * (1 - MARGIN) <= value <= high * (1 + MARGIN):
                return OutOfRange(shape.phase, quantity, value, low, high)
        return max(round(_dot(fit.coefficients, _row(shape))), fit.fastest_ns)


def _row(shape: StepShape) -> list[float]:
    return [1.0, *(float(getattr(shape, quantity)) for quantity in QUANTITIES)]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _fit(steps: list[tuple[StepShape, int]]) -> PhaseFit:
    rows = [_row(shape) for shape, _ in steps]
    times = [float(wall_ns) for _, wall_ns in steps]
    num_terms = min(len(QUANTITIES) + 1, len(steps) // _STEPS_PER_TERM + 1)
    folds = [_Sums(num_terms) for _ in range(_NUM_FOLDS)]
    for index, (row, time) in enumerate(zip(rows, times, strict=True)):
        folds[index % _NUM_FOLDS].add(row, time)
    coefficients = _Sums.all_of(folds).solve()
    r_squared = median_error = None
    if len(steps) >= _NUM_FOLDS:
        lines = [_Sums.all_of(folds[:out] + folds[out + 1 :]).solve() for out in range(_NUM_FOLDS)]
        guesses = [_dot(lines[index % _NUM_FOLDS], row) for index, row in enumerate(rows)]
        misses = [abs(guess - time) for guess, time in zip(guesses, times, strict=True)]
        median_error = median(miss / max(time, 1) for miss, time in zip(misses, times, strict=True))
        mean = fmean(times)
        variance = sum((time - mean) ** 2 for time in times)
        r_squared = 1 - sum(miss**2 for miss in misses) / variance if variance else None
    columns = list(zip(*rows, strict=True))[1:]
    return PhaseFit(
        num_steps=len(steps),
        coefficients=tuple(coefficients),
        ranges=tuple((int(min(column)), int(max(column))) for column in columns),
        fastest_ns=int(min(times)),
        r_squared=r_squared,
        median_error=median_error,
    )


class _Sums:
    """The sums of products that least squares needs, over some steps.

    Args:
        num_terms: how many of the line's terms are fitted; the others stay 0.
    """

    def __init__(self, num_terms: int) -> None:
        size = len(QUANTITIES) + 1
        self.num_terms = num_terms
        self.products: Matrix = [[0.0] * (size + 1) for _ in range(size)]  # X'X, and X'y beside it

    @classmethod
    def all_of(cls, parts: list[_Sums]) -> _Sums:
        """The sums over the steps of all parts."""
        whole = cls(parts[0].num_terms)
        for part in parts:
            for mine, its in zip(whole.products, part.products, strict=True):
                mine[:] = [a + b for a, b in zip(mine, its, strict=True)]
        return whole

    def add(self, row: list[float], time: float) -> None:
        """Take in one step."""
        for sums, left in zip(self.products, row, strict=True):
            for place, right in enumerate((*row, time)):
                sums[place] += left * right

    def solve(self) -> list[float]:
        """The line's coefficients, by Gauss-Jordan elimination.

        A column that depends on those before it is skipped (in a decode, tokens = sequences).
        """
        size = len(self.products)
        left = [row[:] for row in self.products]
        used = []
        for column in range(self.num_terms):
            pivot = left[column][column]
            if pivot <= _COLLINEAR * self.products[column][column]:
                continue
            used.append(column)
            left[column] = [value / pivot for value in left[column]]
            for other in range(size):
                factor = left[other][column]
                if other != column and factor:
                    pairs = zip(left[other], left[column], strict=True)
                    left[other] = [value - factor * minus for value, minus in pairs]
        return [left[place][-1] if place in used else 0.0 for place in range(size)]
