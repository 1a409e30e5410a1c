"""Tokenizer: text <-> token ids, through the checkpoint's own transformers tokenizer.

Knows the folder. Does not know chat templates (the caller applies them, as in the article's
example). Loaded at its first use: prompts given as token ids need none until text goes out.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.errors import TokenizerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


class Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        TokenizerError: at its first use, if the folder holds none.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer  # noqa: PLC0415 - heavy, and not always needed

        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True
            )
        except Exception as error:
            raise TokenizerError(
                f"{self.folder} holds no tokenizer that transformers can load "
                f"({type(error).__name__}: {error}); it needs tokenizer.json and "
                "tokenizer_config.json, or give prompts as token ids"
            ) from error
        return tokenizer

    @cached_property
    def exists(self) -> bool:
        """Is there a tokenizer in the folder?"""
        return any((Path(self.folder) / name).is_file() for name in _FILES)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        token_ids: list[int] = self._tokenizer.encode(text)
        return token_ids

    def decode(self, token_ids: list[int]) -> str:
        """Text of `token_ids`, special tokens (the end of a turn) left out.

        A folder without any tokenizer file has no text: "".
        """
        if not self.exists:
            return ""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end-of-sequence token, if it names one."""
        if not self.exists:
            return ()
        eos = self._tokenizer.eos_token_id
        return () if eos is None else (int(eos),)
