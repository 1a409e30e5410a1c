"""The errors that the engine raises on purpose.

Knows only their names. Each is also the standard error it is a kind of, so that a caller who has
never heard of nanovllm can still write `except ValueError`.
"""

from __future__ import annotations


class NanoVLLMError(Exception):
    """Any error that nanovllm raises on purpose."""


class ModelConfigError(NanoVLLMError, ValueError):
    """A model folder whose configuration is unreadable, implausible or not implemented."""


class WeightsError(NanoVLLMError, ValueError):
    """A checkpoint that does not hold exactly the tensors that the model has."""


class KVCacheError(NanoVLLMError, RuntimeError):
    """The memory holds not one KV page, or refuses those asked for."""


class AttentionBackendError(NanoVLLMError, ValueError):
    """An attention backend that was asked for by name and cannot run here."""


class RequestRefusedError(NanoVLLMError, ValueError):
    """A request that could never finish. Nothing of it was queued.

    Attributes:
        reason: "prompt_too_long" (for max_model_len) or "never_fits" (into the page pool).
        need: what the request would take (tokens, or pages).
        have: what there is.
    """

    def __init__(self, message: str, *, reason: str, need: int, have: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.need = need
        self.have = have


class TokenizerError(NanoVLLMError, ValueError):
    """A model folder without a tokenizer that transformers can load."""


class LogitsError(NanoVLLMError, FloatingPointError):
    """The model computed no finite number for any token: its weights or its arithmetic broke."""


class WorkerError(NanoVLLMError, RuntimeError):
    """A process that shares the model died, raised, or did not answer in time.

    The engine is over: its processes have been ended. Make a new one.
    """


class ContactLostError(WorkerError):
    """What a rank sees of another one's end: a collective that failed. The cause lies elsewhere."""
