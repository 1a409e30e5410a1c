"""keep_global_state: undo what other libraries do to random generators and the environment.

Some libraries use Python's global `random` when they are imported (rich does; transformers imports
it through httpx), or set environment variables (torch's inductor, scikit-learn). Without this, a
program that seeds `random`, creates an engine and then uses `random` could get different numbers on
another machine.

Changes that other threads make at the same time are undone as well.
"""

from __future__ import annotations

import os
import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def keep_global_state() -> Iterator[None]:
    """Restore the generators of `random` and numpy, and the environment, on leaving."""
    numpy: Any = sys.modules.get("numpy")  # if it is not loaded, its generator was not used
    states = random.getstate(), numpy and numpy.random.get_state()
    environment = dict(os.environ)
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        # Only what has changed, because a thread of a C library may be reading the rest.
        os.environ.update(environment.items() - os.environ.items())
