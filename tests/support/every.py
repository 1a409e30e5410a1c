"""One test over many names: it tries each, and reports all that fail."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def every(
    argument: str, values: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with each value, as one test.

    For checks of microseconds over every event, file or name; `pytest.mark.parametrize` is for
    cases that are looked at one by one. A fixture is made once, for all values.

    Args:
        argument: the name of the test's argument; or two names, separated by a comma.
        values: one or more values for it; or pairs of values.
    """
    names = [name.strip() for name in argument.split(",")]
    cases = [(value,) if len(names) == 1 else value for value in values]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def test_of_all(**fixtures: object) -> None:
            failures: list[BaseException] = []
            for case in cases:
                chosen = dict(zip(names, case, strict=True))
                try:
                    test(**chosen, **fixtures)
                except (Exception, pytest.fail.Exception) as failure:  # noqa: BLE001 - reported below
                    failure.add_note(f"with {chosen}")
                    failures.append(failure)
            if failures:
                message = f"{len(failures)} of {len(cases)} fail"
                raise BaseExceptionGroup(message, failures)
            assert cases, "there is nothing to try"

        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in names]
        test_of_all.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return test_of_all

    return decorate
