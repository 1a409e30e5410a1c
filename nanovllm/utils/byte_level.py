"""ByteLevelVocabulary: the bytes that each token stands for.

A byte-level BPE (GPT-2's, Qwen's) cuts text into bytes, and a token may hold any run of them: half
a Chinese character, the last third of an emoji. Its vocabulary file is text all the same, since
every byte is written as a printable character: the printable ones of Latin-1 as themselves, the
others as the characters from U+0100 on. This module reads that writing back.

Knows one tokenizer's vocabulary. Does not know what the bytes of several tokens amount to
(`utils/detokenizer.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import decoders

from nanovllm.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def _bytes_of_characters() -> dict[str, int]:
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    written = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return written | {chr(byte): byte for byte in _PRINTABLE}


class ByteLevelVocabulary:
    """Looks tokens up, each only once.

    Args:
        tokenizer: of the tokenizers library.

    Raises:
        TokenizerError: it is no byte-level one, so that its tokens have no bytes of their own.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            raise TokenizerError(
                "streaming and stop strings need a byte-level tokenizer, as Qwen3's is; this one "
                f"decodes by {tokenizer.decoder or 'joining its tokens'}: use generate() without "
                "stop strings"
            )
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}
        self._byte_of = _bytes_of_characters()
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; b"" for a special token and for an id that the tokenizer lacks."""
        if token_id not in self._known:
            self._known[token_id] = self._look_up(token_id)
        return self._known[token_id]

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token in self._special:
            return b""
        try:
            return bytes(self._byte_of[character] for character in token)
        except KeyError:  # an added token, written as it is
            return token.encode()
