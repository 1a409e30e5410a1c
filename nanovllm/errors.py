"""The engine's own exception classes.

Each is also a standard error, so that a caller who does not import nanovllm.errors can write
`except ValueError`.
"""

from __future__ import annotations


class NanoVLLMError(Exception):
    """The base class of nanovllm's own errors."""


class ModelConfigError(NanoVLLMError, ValueError):
    """A model folder whose configuration is unreadable, implausible or not implemented."""


class WeightsError(NanoVLLMError, ValueError):
    """A checkpoint whose tensors are not exactly those of the model."""


class KVCacheError(NanoVLLMError, RuntimeError):
    """The memory does not hold a single KV block, or not as many as were requested."""


class AttentionBackendError(NanoVLLMError, ValueError):
    """An attention backend that was requested by name and cannot run on this machine."""


class RequestRefusedError(NanoVLLMError, ValueError):
    """A request that could never finish. It was not queued.

    Attributes:
        reason: "prompt_too_long" (for max_model_len) or "never_fits" (into the block pool).
        need: tokens or blocks that the request would need.
        have: tokens or blocks that the engine has.
    """

    def __init__(self, message: str, *, reason: str, need: int, have: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.need = need
        self.have = have


class TokenizerError(NanoVLLMError, ValueError):
    """The model's tokenizer is missing or broken, or cannot do what was asked."""


class LogitsError(NanoVLLMError, FloatingPointError):
    """A row of logits has no finite maximum: the weights or the computation are broken."""


class WorkerError(NanoVLLMError, RuntimeError):
    """A process that shares the model died, raised an error, or did not answer in time.

    The engine cannot be used any more: its processes were ended. Create a new one.
    """


class ContactLostError(WorkerError):
    """A collective failed: another rank has ended, or did not take part in time.

    The cause is that rank's own error.
    """
