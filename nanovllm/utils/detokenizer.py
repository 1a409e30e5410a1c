"""Detokenizer: one request's tokens -> text, token by token. It also finds stop strings.

vLLM's counterpart is `vllm/v1/utils/detokenizer.py`.

    tokens  e4 | b8 ad e6 | 96 87 | 21 | 3c 2f
    text       .  中      .  文   . !  . (held back: "</" may become the stop string "</s>")

Two things are held back until more tokens come, so that no text must be taken back: the bytes of a
character that is not complete, and text that may be the beginning of a stop string. The work for a
token depends on the length of its own text only, not on the text before it.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Detokenizer:
    """Turns the generated tokens of one request into text.

    Args:
        token_bytes: token id -> its bytes.
        stop: the text ends before the first of these.

    Attributes:
        stop_string: the stop string that was reached; None before.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        # Bytes that are not valid UTF-8 become U+FFFD, as in the tokenizer's own decode.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [StopMatcher(text) for text in stop]
        self._held = ""  # may be the beginning of a stop string
        self._shown: list[str] = []
        self._num_taken = 0  # items of `_shown` that `take` has returned
        self.stop_string: str | None = None

    def add(self, token_id: int) -> bool:
        """Add the next token. Returns True once a stop string is reached."""
        if self.stop_string is None:
            self._add_text(self._decoder.decode(self._token_bytes(token_id)))
        return self.stop_string is not None

    def finish(self) -> None:
        """No more tokens will come: add what was held back to the text."""
        if self.stop_string is None:
            self._shown.append(self._held + self._decoder.decode(b"", final=True))
            self._held = ""

    def take(self) -> str:
        """The new text since the last call."""
        new = "".join(self._shown[self._num_taken :])
        self._num_taken = len(self._shown)
        return new

    @property
    def text(self) -> str:
        """The text so far, without what is held back."""
        return "".join(self._shown)

    def _add_text(self, new: str) -> None:
        if not new:
            return
        text = self._held + new
        for index, character in enumerate(new, start=len(self._held) + 1):
            reached = [matcher.stop for matcher in self._matchers if matcher.advance(character)]
            if reached:  # several may end at this character: cut before the longest
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
    """Searches for one string in text that is given character by character (Knuth-Morris-Pratt).

    Attributes:
        stop: the string, at least one character.
        num_matched: the text ends with this many of its first characters; the largest such number.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # fallback[n]: of the first n characters, the longest proper suffix that is also a prefix.
        self._fallback = [0, 0]
        for character in stop[1:]:
            length = self._next_length(self._fallback[-1], character)
            self._fallback.append(length)

    def advance(self, character: str) -> bool:
        """Add the next character. Returns True if the text now ends with the string."""
        self.num_matched = self._next_length(self.num_matched, character)
        return self.num_matched == len(self.stop)

    def _next_length(self, length: int, character: str) -> int:
        """`num_matched` after one more character, if it is `length` (not the whole) before."""
        while length and self.stop[length] != character:
            length = self._fallback[length]
        return length + (self.stop[length] == character)
