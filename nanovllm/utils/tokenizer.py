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
from nanovllm.utils.files import check_file, is_there, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VOCABULARIES = ("tokenizer.json", "vocab.json")
_CONFIG = "tokenizer_config.json"


class Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        TokenizerError: at its first use, if the folder holds none, or one that cannot be loaded.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @cached_property
    def of_transformers(self) -> PreTrainedTokenizerBase:
        """The tokenizer itself."""
        from transformers import AutoTokenizer, Qwen3Config  # noqa: PLC0415 - heavy, not always needed

        if not self.exists:  # transformers would make up an empty one
            raise TokenizerError(
                f"{self.folder} holds no tokenizer: add tokenizer.json and {_CONFIG}, "
                "or give prompts as token ids"
            )
        files = self._check_files()
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self.folder,
                config=Qwen3Config(),  # its class counts; the folder's may be out of all reason
                local_files_only=True,
            )
        except Exception as error:
            for file in files:  # which of them is it?
                read_json(file, TokenizerError)
            raise TokenizerError(
                f"{self.folder} holds no tokenizer that transformers can load "
                f"({type(error).__name__}: {error}); it needs tokenizer.json and "
                f"{_CONFIG}, or give prompts as token ids"
            ) from error
        return tokenizer

    def _check_files(self) -> list[Path]:
        """Return the JSON files that there are, if they can be read and none is missing."""
        folder = Path(self.folder)
        for choice in (_VOCABULARIES, (_CONFIG,)):  # without it, transformers guesses the kind
            if not any(is_there(folder / name) for name in choice):
                raise TokenizerError(
                    f"{folder} holds half a tokenizer: {' or '.join(choice)} is missing; add it, "
                    "or remove the other tokenizer files and give prompts as token ids"
                )
        others = ("special_tokens_map.json", "added_tokens.json")
        names = (*_VOCABULARIES, _CONFIG, *others)
        files = [folder / name for name in names if is_there(folder / name)]
        for file in files:
            check_file(file, TokenizerError)
        return files

    @cached_property
    def exists(self) -> bool:
        """Is there a tokenizer in the folder, be it whole or not?"""
        return any(is_there(Path(self.folder) / name) for name in (*_VOCABULARIES, _CONFIG))

    def load(self, vocab_size: int) -> None:
        """Read the files now, if there are any.

        Args:
            vocab_size: the model's.

        Raises:
            TokenizerError: they are broken, or belong to a model with a larger vocabulary.
        """
        if not self.exists:
            return
        token, largest = max(self.of_transformers.get_vocab().items(), key=lambda item: item[1])
        if largest >= vocab_size:
            raise TokenizerError(
                f"{self.folder} holds a tokenizer that does not belong to the model: the id of "
                f"{token!r} is {largest}, but config.json says vocab_size = {vocab_size}; take "
                "both from the same checkpoint"
            )

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        token_ids: list[int] = self.of_transformers.encode(text, verbose=False)
        return token_ids

    def apply_chat_template(self, message: str) -> str:
        """The prompt in which a user says `message` and the assistant is about to answer.

        A tokenizer without a chat template is for a base model: the message is the prompt.

        Raises:
            TokenizerError: the template is broken.
        """
        if not self.of_transformers.chat_template:
            return message
        turn = [{"role": "user", "content": message}]
        try:
            return str(
                self.of_transformers.apply_chat_template(
                    turn, tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:
            raise TokenizerError(
                f"{self.folder} holds a chat template that cannot be filled in "
                f"({type(error).__name__}: {error}): mend chat_template.jinja or the "
                f"chat_template of {_CONFIG}"
            ) from error

    def decode(self, token_ids: list[int]) -> str:
        """Text of `token_ids`, special tokens (the end of a turn) left out.

        A folder without any tokenizer file has no text: "".
        """
        if not self.exists:
            return ""
        return str(self.of_transformers.decode(token_ids, skip_special_tokens=True))

    @cached_property
    def _vocabulary(self) -> ByteLevelVocabulary:
        return ByteLevelVocabulary(self.of_transformers.backend_tokenizer)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; b"" for a special token.

        A folder without any tokenizer file has no text: b"".

        Raises:
            TokenizerError: the tokenizer is no byte-level one.
        """
        return self._vocabulary[token_id] if self.exists else b""

    def check_detokenizable(self, need: str) -> None:
        """Raise TokenizerError if no text can be made token by token."""
        if not self.exists:
            raise TokenizerError(
                f"{need} a tokenizer, and {self.folder} holds none: add "
                "tokenizer.json and tokenizer_config.json"
            )
        self.token_bytes(0)

    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end-of-sequence token, if it names one."""
        if not self.exists:
            return ()
        eos = self.of_transformers.eos_token_id
        return () if eos is None else (int(eos),)
