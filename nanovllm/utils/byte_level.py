"""ByteLevelVocabulary: the bytes of each token.

The tokens of a byte-level BPE (GPT-2's, Qwen's) are sequences of bytes: a token may hold a part of
a Chinese character or of an emoji. Its vocabulary file is text, in which every byte is written as a
printable character: the printable ones of Latin-1 as themselves, the others as the characters from
U+0100 on. This module turns them back into bytes. `utils/detokenizer.py` turns the bytes of several
tokens into text.
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
    """Token id -> bytes, with a cache.

    Args:
        tokenizer: of the tokenizers library.

    Raises:
        TokenizerError: it is not a byte-level tokenizer, so a token alone has no bytes.
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
        """The token's bytes; b"" for a special token and for an unknown id."""
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
