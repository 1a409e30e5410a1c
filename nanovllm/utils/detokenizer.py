"""Detokenizer: one request's tokens -> text, as they come. It also finds stop strings.

Knows bytes, characters and what the request wants to stop at. Does not know tokenizers (it is told
each token's bytes) or how a request ends (`scheduler.py`). vLLM's counterpart is
`vllm/v1/utils/detokenizer.py`.

    tokens  e4 | b8 ad e6 | 96 87 | 21 | 3c 2f
    text       .  中      .  文   . !  . (held: "</" may become the stop string "</s>")

Two things are held back, so that nothing shown is ever taken back: the bytes of a character that is
not yet complete, and text that may turn out to be the beginning of a stop string. The work for each
token depends on its own length only, never on what came before.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Detokenizer:
    """Turns the generated tokens of one request into text.

    Args:
        token_bytes: token id -> the bytes it stands for.
        stop: the text ends before the first of these.

    Attributes:
        stop_string: the stop string that was reached; None before.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        # Bytes that are no UTF-8 become U+FFFD, at the same places as in the tokenizer's decode.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [StopMatcher(text) for text in stop]
        self._held = ""  # may be the beginning of a stop string
        self._shown: list[str] = []
        self._num_taken = 0  # pieces of `_shown` that `take` has given out
        self.stop_string: str | None = None

    def add(self, token_id: int) -> bool:
        """Take in the next token. Returns True once a stop string is reached."""
        if self.stop_string is None:
            self._add_text(self._decoder.decode(self._token_bytes(token_id)))
        return self.stop_string is not None

    def finish(self) -> None:
        """No more tokens will come: show what was held back."""
        if self.stop_string is None:
            self._shown.append(self._held + self._decoder.decode(b"", final=True))
            self._held = ""

    def take(self) -> str:
        """The text shown since the last call."""
        new = "".join(self._shown[self._num_taken :])
        self._num_taken = len(self._shown)
        return new

    @property
    def text(self) -> str:
        """All text shown so far."""
        return "".join(self._shown)

    def _add_text(self, new: str) -> None:
        if not new:
            return
        text = self._held + new
        for index, character in enumerate(new, start=len(self._held) + 1):
            reached = [matcher.stop for matcher in self._matchers if matcher.advance(character)]
            if reached:  # several may end at once: cut before the longest
                self.stop_string = max(reached, key=len)
                self._show(text[: index - len(self.stop_string)])
                return
        num_held = max((matcher.num_matched for matcher in self._matchers), default=0)
        self._held = text[len(text) - num_held :]
        self._show(text[: len(text) - num_held])

    def _show(self, text: str) -> None:
        if text:
            self._shown.append(text)


class StopMatcher:
    """Looks for one string in text that comes character by character (Knuth, Morris and Pratt).

    Attributes:
        stop: the string, at least one character.
        num_matched: how many of its first characters the text ends with, as many as possible.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # fallback[n]: of the first n characters, the longest end that is also a beginning.
        self._fallback = [0, 0]
        for character in stop[1:]:
            length = self._next_length(self._fallback[-1], character)
            self._fallback.append(length)

    def advance(self, character: str) -> bool:
        """Take in the next character. Returns True if the text ends with the string now."""
        self.num_matched = self._next_length(self.num_matched, character)
        return self.num_matched == len(self.stop)

    def _next_length(self, length: int, character: str) -> int:
        """What `length` becomes with one more character; it must be less than the whole."""
        while length and self.stop[length] != character:
            length = self._fallback[length]
        return length + (self.stop[length] == character)
