"""The errors that the engine raises on purpose.

Each is also a standard error, so that a caller who does not import nanovllm.errors can write
`except ValueError`.
"""

from __future__ import annotations


class NanoVLLMError(Exception):
    """Any error that nanovllm raises on purpose."""


class ModelConfigError(NanoVLLMError, ValueError):
    """A model folder whose configuration is unreadable, implausible or not implemented."""


class WeightsError(NanoVLLMError, ValueError):
    """A checkpoint that does not hold exactly the tensors that the model has."""


class KVCacheError(NanoVLLMError, RuntimeError):
    """There is no memory for one KV block, or not for as many as were asked for."""


class AttentionBackendError(NanoVLLMError, ValueError):
    """An attention backend that was asked for by name and cannot run here."""


class RequestRefusedError(NanoVLLMError, ValueError):
    """A request that could never finish. Nothing of it was queued.

    Attributes:
        reason: "prompt_too_long" (for max_model_len) or "never_fits" (into the block pool).
        need: what the request would take (tokens, or blocks).
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
    """A row of logits has no finite maximum: the weights or the arithmetic are broken."""


class WorkerError(NanoVLLMError, RuntimeError):
    """A process that shares the model died, raised, or did not answer in time.

    The engine cannot be used any more: its processes were ended. Make a new one.
    """


class ContactLostError(WorkerError):
    """A collective failed, since another rank has ended. The cause is in that other rank."""
