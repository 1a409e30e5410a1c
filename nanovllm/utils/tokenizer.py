"""Tokenizer: text <-> token ids, through the checkpoint's own transformers tokenizer.

Knows the folder. `generate` takes prompts as they are: whoever wants the chat template applies it
first, as the article's example does. Loaded at its first use: prompts given as token ids need none
until text goes out.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.errors import TokenizerError
from nanovllm.utils.byte_level import ByteLevelVocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer.json", "vocab.json")


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

        if not self.exists:  # transformers would make up an empty one
            raise TokenizerError(
                f"{self.folder} holds no tokenizer: add tokenizer.json and tokenizer_config.json, "
                "or give prompts as token ids"
            )
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

    def load(self) -> None:
        """Read the files now, if there are any. Raises TokenizerError if they are broken."""
        if self.exists:
            _ = self._tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        token_ids: list[int] = self._tokenizer.encode(text, verbose=False)
        return token_ids

    def apply_chat_template(self, message: str) -> str:
        """The prompt in which a user says `message` and the assistant is about to answer.

        A tokenizer without a chat template is for a base model: the message is the prompt.
        """
        if not self._tokenizer.chat_template:
            return message
        turn = [{"role": "user", "content": message}]
        return str(
            self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        )

    def decode(self, token_ids: list[int]) -> str:
        """Text of `token_ids`, special tokens (the end of a turn) left out.

        A folder without any tokenizer file has no text: "".
        """
        if not self.exists:
            return ""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    @cached_property
    def _vocabulary(self) -> ByteLevelVocabulary:
        return ByteLevelVocabulary(self._tokenizer.backend_tokenizer)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; b"" for a special token.

        A folder without any tokenizer file has no text: b"".

        Raises:
            TokenizerError: the tokenizer is no byte-level one.
        """
        return self._vocabulary[token_id] if self.exists else b""

    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end-of-sequence token, if it names one."""
        if not self.exists:
            return ()
        eos = self._tokenizer.eos_token_id
        return () if eos is None else (int(eos),)
