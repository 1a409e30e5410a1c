"""The detokenizer: what it shows, and when, against the tokenizer's own decode of everything."""

# ruff: noqa: RUF001 - Chinese has its own comma

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING
from unicodedata import normalize

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm.assets import TINY_QWEN3
from nanovllm.errors import TokenizerError
from nanovllm.utils.detokenizer import Detokenizer
from nanovllm.utils.tokenizer import Tokenizer
from support.oracle import save_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

NUM_IDS = 3080  # a few more than the tokenizer has: a model's vocabulary may be padded
SAMPLES = st.sampled_from(
    ["你好，世界", "👩‍👩‍👧‍👦🏳️‍🌈", "e\u0301", "\ufffd", "naïve", "\x00\n\t", "ﷺ"]
)


@cache
def tokenizer() -> Tokenizer:
    """The tiny Qwen3's."""
    return Tokenizer(str(TINY_QWEN3))


def pieces(token_ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    """What is shown after each token, and at the end."""
    detokenizer = Detokenizer(tokenizer().token_bytes, stop)
    shown = []
    for token_id in token_ids:
        detokenizer.add(token_id)
        shown.append(detokenizer.take())
    detokenizer.finish()
    shown.append(detokenizer.take())
    assert detokenizer.text == "".join(shown)
    return shown


def letters(text: str, stop: tuple[str, ...]) -> Detokenizer:
    """One token a character, until the stop."""
    detokenizer = Detokenizer(lambda token_id: chr(token_id).encode(), stop)
    for character in text:
        if detokenizer.add(ord(character)):
            break
    return detokenizer


@given(st.text() | st.lists(SAMPLES).map("".join))
def test_text_comes_back_in_whole_characters(text: str) -> None:
    token_ids = tokenizer().encode(text)
    shown = pieces(token_ids)
    assert "".join(shown) == tokenizer().decode(token_ids)
    assert "".join(shown) == normalize("NFC", text), "Qwen's tokenizer composes characters"
    assert shown[-1] == ""
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(shown)


@given(st.lists(st.integers(0, NUM_IDS - 1) | st.integers(0, 300) | st.integers(3060, 3075)))
@example([3067, 3070, 3069, 3071])  # special, added, special, added
def test_any_tokens_become_the_text_that_decode_makes_of_all_of_them(token_ids: list[int]) -> None:
    assert "".join(pieces(token_ids)) == tokenizer().decode(token_ids)


@given(st.binary() | st.text().map(lambda text: text.encode()[1:-1]), st.data())
def test_bytes_that_are_no_text_are_shown_as_decode_shows_them(
    data: bytes, source: st.DataObject
) -> None:
    ids = source.draw(st.just([byte_ids()[byte] for byte in data]))
    assert "".join(pieces(ids)) == tokenizer().decode(ids) == data.decode(errors="replace")


@cache
def byte_ids() -> dict[int, int]:
    """A byte -> the token that is just this byte."""
    found: dict[int, int] = {}
    for token_id in range(NUM_IDS):
        data = tokenizer().token_bytes(token_id)
        if len(data) == 1:
            found.setdefault(data[0], token_id)
    assert len(found) == 256
    return found


def test_half_a_character_is_held_back() -> None:
    ids = [byte_ids()[byte] for byte in "中a👍".encode()]
    assert pieces(ids) == ["", "", "中", "a", "", "", "", "👍", ""]


def test_half_a_character_at_the_end_is_shown_as_what_it_is() -> None:
    ids = [byte_ids()[byte] for byte in "中".encode()[:2]]
    assert pieces(ids) == ["", "", "\ufffd"]


def test_the_work_for_a_token_does_not_grow_with_the_text() -> None:
    asked: list[int] = []

    def token_bytes(token_id: int) -> bytes:
        asked.append(token_id)
        return b"\x80"  # never a character: a window over the text would grow and grow

    detokenizer = Detokenizer(token_bytes, ["stop"])
    for token_id in range(2000):
        detokenizer.add(token_id)
        assert detokenizer.take() == "\ufffd"
    assert asked == list(range(2000))


# -- stop strings ----------------------------------------------------------------------------------


def test_what_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(lambda token_id: chr(token_id).encode(), ["</s>"])
    shown = []
    for character in "a</b</</s>":
        detokenizer.add(ord(character))
        shown.append(detokenizer.take())
    assert shown == ["a", "", "", "</b", "", "", "</", "", "", ""]
    assert detokenizer.stop_string == "</s>"
    detokenizer.finish()
    assert detokenizer.text == "a</b</"


def test_what_was_held_back_is_shown_at_the_end() -> None:
    detokenizer = letters("see</s", ("</s>",))
    assert detokenizer.take() == "see"
    detokenizer.finish()
    assert detokenizer.take() == "</s"
    assert detokenizer.stop_string is None


def test_a_stop_string_within_one_token_is_cut_out_with_all_behind_it() -> None:
    detokenizer = Detokenizer(lambda _: b"one. Two. Three", [". T"])
    assert detokenizer.add(0)
    assert detokenizer.add(0), "nothing more is taken in"
    detokenizer.finish()
    assert detokenizer.text == "one"


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The plain way: try every end."""
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


AB = st.text("ab", max_size=30)


@given(AB, st.lists(st.text("ab", min_size=1, max_size=6), max_size=4).map(tuple))
def test_the_first_stop_string_to_end_is_found_whatever_overlaps(
    text: str, stop: tuple[str, ...]
) -> None:
    detokenizer = letters(text, stop)
    shown = detokenizer.text
    detokenizer.finish()
    assert (detokenizer.text, detokenizer.stop_string) == first_stop(text, stop)
    assert detokenizer.text.startswith(shown)
    if detokenizer.stop_string is None:
        held = detokenizer.text[len(shown) :]
        begun = [n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])]
        assert len(held) == max(begun, default=0), "no more is held back than must be"


@given(AB, st.lists(st.text("ab", min_size=1, max_size=6), max_size=4).map(tuple), st.data())
def test_it_does_not_matter_how_the_text_is_cut_into_tokens(
    text: str, stop: tuple[str, ...], data: st.DataObject
) -> None:
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text))))})
    tokens = [text[a:b].encode() for a, b in pairwise(cuts)]
    detokenizer = Detokenizer(lambda token_id: tokens[token_id], stop)
    for token_id in range(len(tokens)):
        detokenizer.add(token_id)
    detokenizer.finish()
    assert (detokenizer.text, detokenizer.stop_string) == first_stop(text, stop)


# -- tokens as bytes -------------------------------------------------------------------------------


def test_a_special_token_and_an_unknown_one_have_no_bytes() -> None:
    assert tokenizer().token_bytes(3067) == b""
    assert tokenizer().token_bytes(NUM_IDS) == b""
    assert tokenizer().token_bytes(3070) == b"<think>"


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="byte-level"):
        Tokenizer(str(tmp_path)).token_bytes(3)


def test_a_folder_without_a_tokenizer_has_no_text(tmp_path: Path) -> None:
    assert Tokenizer(str(tmp_path)).token_bytes(3) == b""
