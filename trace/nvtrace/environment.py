"""Which packages are installed. It does not import them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def version_of(package: str) -> str | None:
    """The version of a package; "unknown" if only its files exist, None if it is not installed.

    Args:
        package: its name as pip knows it.
    """
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout, or built by hand
        return "unknown" if find_spec(package.replace("-", "_")) else None
