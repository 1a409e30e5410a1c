"""Which packages are installed. It does not import them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

_DISTRIBUTION = "nanovllm-nvtrace"  # the packages nanovllm, nvtrace and nvtrace_cli
_EXTRAS = dict.fromkeys(("torch", "transformers", "safetensors", "tokenizers"), "engine")
_EXTRAS |= dict.fromkeys(("pandas", "numpy"), "frames") | {"matplotlib": "notebooks"}
_EXTRAS |= dict.fromkeys(("google", "opentelemetry"), "otlp")
_NAMES = {"google": "protobuf", "opentelemetry": "opentelemetry-proto"}  # as pip knows them


def version_of(package: str) -> str | None:
    """The version of a package; "unknown" if only its files exist, None if it is not installed.

    Args:
        package: its name as pip knows it.
    """
    try:
        return version(_DISTRIBUTION if package == "nanovllm" else package)
    except PackageNotFoundError:  # run from a checkout, or built by hand
        return "unknown" if find_spec(package.replace("-", "_")) else None


def install_advice(module: str | None) -> str | None:
    """What to install when this module is missing; None if no extra of this package brings it."""
    package = (module or "").partition(".")[0]
    if package not in _EXTRAS:
        return None
    command = f"pip install '{_DISTRIBUTION}[{_EXTRAS[package]}]'"
    return f"this needs {_NAMES.get(package, package)}, which is not installed: {command}"


def with_advice(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The same error; if an extra brings what is missing, it says which."""
    advice = install_advice(error.name)
    return error if advice is None else ModuleNotFoundError(advice, name=error.name)
