"""What belongs to the caller's program, kept as it was while other libraries are at work.

Some draw from Python's global `random` when they are imported (rich does, which httpx imports for
transformers), or set environment variables (torch's inductor, scikit-learn). A program that seeds,
makes an engine and draws would get other numbers on another machine.

Knows the generators of `random` and numpy, and the environment. Does not know who changed them:
what another thread draws or sets meanwhile is undone as well.
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
    """Leave the generators and the environment as they were when this was entered."""
    numpy: Any = sys.modules.get("numpy")  # one that is not loaded has drawn nothing yet
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
        # Only what has changed: a thread of a C library may be reading the others.
        os.environ.update(environment.items() - os.environ.items())
