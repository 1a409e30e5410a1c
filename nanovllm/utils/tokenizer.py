"""Tokenizer: text <-> token ids, with the checkpoint's own transformers tokenizer.

`generate` does not apply the chat template: the caller does, as in the article's example. Special
tokens are added to plain text, but not to text that a chat template has written, which has them
already. The tokenizer is loaded at its first use.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.errors import TokenizerError
from nanovllm.utils.byte_level import ByteLevelVocabulary
from nanovllm.utils.files import check_file, is_there, read_json
from nanovllm.utils.options import prompt_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VOCABULARIES = ("tokenizer.json", "vocab.json")
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"


class Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        TokenizerError: at its first use, if the folder has none, or one that cannot be loaded.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @cached_property
    def of_transformers(self) -> PreTrainedTokenizerBase:
        """The tokenizer of transformers."""
        from transformers import AutoTokenizer, Qwen3Config  # noqa: PLC0415 - heavy, not always needed

        if not self.exists:  # transformers would create an empty one
            raise TokenizerError(
                f"{self.folder} has no tokenizer: add tokenizer.json and {_CONFIG}, "
                "or give prompts as token ids"
            )
        files = self._check_files()
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self.folder,
                config=Qwen3Config(),  # only its class is used; the folder's config may be broken
                local_files_only=True,
            )
        except Exception as error:
            for file in files:  # find the one that is broken
                if file.suffix == ".json":
                    read_json(file, TokenizerError)
            raise TokenizerError(
                f"{self.folder} has no tokenizer that transformers can load "
                f"({type(error).__name__}: {error}); it needs tokenizer.json and "
                f"{_CONFIG}, or give prompts as token ids"
            ) from error
        return tokenizer

    def _check_files(self) -> list[Path]:
        """Return the tokenizer's files, if they can be read and none is missing."""
        folder = Path(self.folder)
        for choice in (_VOCABULARIES, (_CONFIG,)):  # without a config, transformers guesses
            if not any(is_there(folder / name) for name in choice):
                raise TokenizerError(
                    f"{folder} has an incomplete tokenizer: {' or '.join(choice)} is missing; add "
                    "it, or remove the other tokenizer files and give prompts as token ids"
                )
        others = ("special_tokens_map.json", "added_tokens.json", "merges.txt", _TEMPLATE)
        names = (*_VOCABULARIES, _CONFIG, *others)
        files = [folder / name for name in names if is_there(folder / name)]
        for file in files:
            check_file(file, TokenizerError)
        return files

    @cached_property
    def exists(self) -> bool:
        """Does the folder have a tokenizer, complete or not?"""
        return any(is_there(Path(self.folder) / name) for name in (*_VOCABULARIES, _CONFIG))

    def load(self, vocab_size: int) -> None:
        """Read the files now, if there are any.

        Args:
            vocab_size: the model's.

        Raises:
            TokenizerError: they are broken, or have an id that the model has no embedding for.
                (Added tokens may have one, except the end-of-sequence token.)
        """
        if not self.exists:
            return
        tokenizer = self.of_transformers
        added = set(tokenizer.get_added_vocab()) - {tokenizer.eos_token}
        ids = ((i, token) for token, i in tokenizer.get_vocab().items() if token not in added)
        largest, token = max(ids, default=(0, ""))
        if largest >= vocab_size:
            files = [f for name in _VOCABULARIES if is_there(f := Path(self.folder) / name)]
            texts = (json.dumps(read_json(f, TokenizerError)) for f in files)
            if not any(json.dumps(token) in text for text in texts):
                raise TokenizerError(
                    f"{self.folder}: the eos_token {token!r} is not in {files[0].name}: correct "
                    f"it in {_CONFIG}, or take all of the model's own tokenizer files"
                )
            raise TokenizerError(
                f"{self.folder} has a tokenizer with more tokens than the model has embeddings: "
                f"the id of {token!r} is {largest}, but config.json says vocab_size = "
                f"{vocab_size}; take the model's own tokenizer, or give the model more embeddings"
            )

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer adds.

        None are added to a text that begins with them: a chat template has written it.
        """
        plain = self._encode(text, special=False) if self._front else []
        is_written = plain[: len(self._front)] == self._front != []
        return plain if is_written else self._encode(text, special=True)

    @cached_property
    def _front(self) -> list[int]:
        """The special tokens that come before a text: the BOS token, say."""
        full, plain = (self._encode("a", special=special) for special in (True, False))
        places = (i for i in range(len(full), -1, -1) if full[i : i + len(plain)] == plain)
        return full[: next(places, 0)]

    def apply_chat_template(self, message: str, /, **kwargs: object) -> list[int]:
        """Token ids of the prompt for a chat with one user message.

        Without a chat template (a base model), the message is the prompt.

        Args:
            message: the user's message.
            **kwargs: for the template: `enable_thinking=False`, say.

        Raises:
            TokenizerError: the template is broken, or there is none and `kwargs` are given.
        """
        if not self.of_transformers.chat_template:
            if kwargs:
                raise TokenizerError(
                    f"{self.folder} has no chat template, so {', '.join(kwargs)} would "
                    f"change nothing: add {_TEMPLATE}, or leave the chat_template_kwargs out"
                )
            return self.encode(message)
        options: dict[str, Any] = {"add_generation_prompt": True, **kwargs, "tokenize": False}
        turn = [{"role": "user", "content": message}]
        try:
            text = str(self.of_transformers.apply_chat_template(turn, **options))
        except Exception as error:
            raise TokenizerError(
                f"{self.folder} has a chat template that cannot be rendered "
                f"({type(error).__name__}: {error}): correct {_TEMPLATE}, the "
                f"chat_template of {_CONFIG}, or the chat_template_kwargs"
            ) from error
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        encode = self.of_transformers.encode
        return list(encode(prompt_text(text), add_special_tokens=special, verbose=False))

    def decode(self, token_ids: list[int]) -> str:
        """Text of `token_ids`, without special tokens; "" if the folder has no tokenizer."""
        if not self.exists:
            return ""
        return str(self.of_transformers.decode(token_ids, skip_special_tokens=True))

    @cached_property
    def _vocabulary(self) -> ByteLevelVocabulary:
        return ByteLevelVocabulary(self.of_transformers.backend_tokenizer)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; b"" for a special token, or if the folder has no tokenizer.

        Raises:
            TokenizerError: the tokenizer is not a byte-level one.
        """
        return self._vocabulary[token_id] if self.exists else b""

    def check_detokenizable(self, need: str) -> None:
        """Raise TokenizerError if the tokenizer cannot decode token by token."""
        if not self.exists:
            raise TokenizerError(
                f"{need} a tokenizer, and {self.folder} has none: add "
                "tokenizer.json and tokenizer_config.json"
            )
        self.token_bytes(0)

    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end-of-sequence token, if it has one."""
        if not self.exists:
            return ()
        eos = self.of_transformers.eos_token_id
        return () if eos is None else (int(eos),)
