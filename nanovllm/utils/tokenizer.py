"""Tokenizer: text <-> token ids, through the checkpoint's own transformers tokenizer.

Knows the folder. `generate` takes prompts as they are: whoever wants the chat template applies it
first, as the article's example does. Special tokens are added to plain text, as the tokenizer says,
and not to what a template has written: it has its own. Loaded at its first use: prompts given as
token ids need none until text goes out.
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
                f"{self.folder} has no tokenizer: add tokenizer.json and {_CONFIG}, "
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
                if file.suffix == ".json":
                    read_json(file, TokenizerError)
            raise TokenizerError(
                f"{self.folder} has no tokenizer that transformers can load "
                f"({type(error).__name__}: {error}); it needs tokenizer.json and "
                f"{_CONFIG}, or give prompts as token ids"
            ) from error
        return tokenizer

    def _check_files(self) -> list[Path]:
        """Return the files that there are, if they can be read and none is missing."""
        folder = Path(self.folder)
        for choice in (_VOCABULARIES, (_CONFIG,)):  # without it, transformers guesses the kind
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
        """Is there a tokenizer in the folder, be it whole or not?"""
        return any(is_there(Path(self.folder) / name) for name in (*_VOCABULARIES, _CONFIG))

    def load(self, vocab_size: int) -> None:
        """Read the files now, if there are any.

        Args:
            vocab_size: the model's.

        Raises:
            TokenizerError: they are broken, or have ids that the model has no embeddings for. Such
                an added token is allowed, since the model never draws it, but not as the end.
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

        A text that begins with those already was written by a chat template: none are added.
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
        """Token ids of the prompt in which a user says `message` and the assistant will answer.

        A tokenizer without a chat template is for a base model: the message is the prompt.

        Args:
            message: what the user says.
            **kwargs: for the template: `enable_thinking=False`, say.

        Raises:
            TokenizerError: the template is broken, or there is none to give `kwargs` to.
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
                f"{need} a tokenizer, and {self.folder} has none: add "
                "tokenizer.json and tokenizer_config.json"
            )
        self.token_bytes(0)

    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end-of-sequence token, if it names one."""
        if not self.exists:
            return ()
        eos = self.of_transformers.eos_token_id
        return () if eos is None else (int(eos),)
