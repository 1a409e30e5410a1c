"""nanovllm: an LLM inference engine that can be read in an afternoon.

`LLM` and `SamplingParams` are the public API; the engine reports what it does to an `Observer`.
Importing the package does not load torch: that happens at the first use of `LLM`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.observer import Observer
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.global_state import keep_global_state

if TYPE_CHECKING:
    from nanovllm.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Observer", "SamplingParams", "__version__"]


if not TYPE_CHECKING:  # to a type checker, a module with this function has every name

    def __getattr__(name: str) -> object:
        if name == "LLM":
            with keep_global_state():
                from nanovllm.llm import LLM  # noqa: PLC0415 - torch is loaded only when needed

            return LLM
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
