"""How many CPU threads a step computes with: one, if it is too small to share.

A product that several threads share ends when the last of them does, and a thread that sleeps takes
about 100 us to wake (one that does not sleep burns a core that others may need). A step has a few
products a layer, so for a model of a few million weights the waking costs more than the work:

        one thread       |==|==|==|                  a decode step of the model that ships,
        two threads      |=.....|=.....|=.....|      = computing, . waking

Knows torch's own thread count, which is the process's: it is set for the length of a step and set
back after it. Does not know what is computed, only how much.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

# One core reads about 10 GB and does about 80 billion multiply-adds a second, both within a factor
# of two: for fewer rows than this, it waits for the weights, and not for the arithmetic.
ROWS_OF_EQUAL_TIME = 8
# Products this small end within a few times 100 us on one core. Measured on two, on both sides of
# it: docs/decisions/0007-pack-weights-on-cpu.md.
SMALLEST_SHARED_PRODUCT = 3_000_000


def is_worth_sharing(num_rows: int, num_weights: int) -> bool:
    """Do several threads multiply faster than one?

    Args:
        num_rows: tokens in the step.
        num_weights: numbers in the matrix that they are multiplied with.
    """
    return max(num_rows, ROWS_OF_EQUAL_TIME) * num_weights >= SMALLEST_SHARED_PRODUCT


def threads_for(num_rows: int, num_weights: int) -> AbstractContextManager[None]:
    """Within this, compute with as many threads as pay for such products, and then as before."""
    return nullcontext() if is_worth_sharing(num_rows, num_weights) else num_threads(1)


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Within this, compute with so many threads, and then with as many as before."""
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
