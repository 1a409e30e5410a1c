"""How many CPU threads a step computes with: one, if its products are small.

A product that several threads share ends when the last of them ends, and a sleeping thread takes
about 100 us to wake. A step has a few products in each layer, so for a model of a few million
weights the waking costs more than the computation:

        one thread       |==|==|==|                  a decode step of the model that ships,
        two threads      |=.....|=.....|=.....|      = computing, . waking

torch's thread count belongs to the process: it is set for one step, and restored after it.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

# One core reads about 10 GB and does about 80 billion multiply-adds a second (within a factor of
# two): with fewer rows than this, the time is that of reading the weights, not of the arithmetic.
ROWS_OF_EQUAL_TIME = 8
# Smaller products take no more than a few times 100 us on one core. Measured on a machine with two
# cores: docs/decisions/0007-pack-weights-on-cpu.md.
SMALLEST_SHARED_PRODUCT = 3_000_000


def is_worth_sharing(num_rows: int, num_weights: int) -> bool:
    """Do several threads multiply faster than one?

    Args:
        num_rows: tokens in the step.
        num_weights: numbers in the weight matrix.
    """
    return max(num_rows, ROWS_OF_EQUAL_TIME) * num_weights >= SMALLEST_SHARED_PRODUCT


def threads_for(num_rows: int, num_weights: int) -> AbstractContextManager[None]:
    """A context manager: compute with as many threads as are faster for such products."""
    return nullcontext() if is_worth_sharing(num_rows, num_weights) else num_threads(1)


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Compute with this many threads, and restore the number after it."""
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
