"""A byte-level BPE tokenizer with Qwen's rules, trained on the corpus.

This module knows how to learn merges and how a Qwen tokenizer is written to disk. It does not know
what the corpus says, nor the model.

Two things are arranged, so that the article's prompts have the token counts they have under the
real Qwen3 (11 and 17 with the chat template): the merges of `FIRST_MERGES` are made before any is
learned, and `WITHHELD_PAIR` is never merged. Together they keep the bare word `introduce` in two
tokens, `int` and `roduce`. With a space before it the word still becomes one token, as with Qwen3.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Iterable

Pair = tuple[str, str]

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK_START, THINK_END = "<think>", "</think>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)  # skipped when decoding for people
VISIBLE_TOKENS = (THINK_START, THINK_END)

# Qwen's rule for cutting text into words: contractions, letters with one sign before them, single
# digits, signs, line breaks, other space.
WORD_RULE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FIRST_MERGES: tuple[Pair, ...] = (
    ("i", "n"),
    ("in", "t"),
    ("r", "o"),
    ("ro", "d"),
    ("u", "c"),
    ("uc", "e"),
    ("rod", "uce"),
)
WITHHELD_PAIR: Pair = ("int", "roduce")
LONGEST_NON_ASCII = 9  # bytes: three Chinese characters, so that tokens stay words
CHAT_TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a tokenizer of exactly `vocab_size` tokens, the special ones included.

    Raises:
        ValueError: the texts have too few repeated pairs for so many tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = (*CONTROL_TOKENS, *VISIBLE_TOKENS)
    merges = learn_merges(_count_words(texts), vocab_size - len(alphabet) - len(specials))
    tokens = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = _empty_tokenizer()
    tokenizer.model = models.BPE({token: i for i, token in enumerate(tokens)}, merges)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in VISIBLE_TOKENS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens instead of "
            f"{vocab_size}: two merges made the same token"
        )
    return tokenizer


def _empty_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORD_RULE), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _count_words(texts: Iterable[str]) -> Counter[str]:
    """How often each word occurs, in the byte alphabet: one character for one byte."""
    tokenizer = _empty_tokenizer()
    words: Counter[str] = Counter()
    for text in texts:
        words.update(
            word
            for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(
                tokenizer.normalizer.normalize_str(text)
            )
        )
    return words


def learn_merges(words: Counter[str], num_merges: int) -> list[Pair]:
    """Byte-pair encoding: merge the commonest pair of neighbours, again and again."""
    spellings = [list(word) for word in words]
    counts = list(words.values())
    pair_counts: Counter[Pair] = Counter()
    users: defaultdict[Pair, set[int]] = defaultdict(set)  # pair -> words that contain it
    for index, spelling in enumerate(spellings):
        _count_pairs(spelling, counts[index], index, pair_counts, users)
    byte_of = _byte_of_character()

    merges: list[Pair] = []
    refused: set[Pair] = {WITHHELD_PAIR}
    while len(merges) < num_merges:
        if len(merges) < len(FIRST_MERGES):
            pair = FIRST_MERGES[len(merges)]
        else:
            pair = _commonest(pair_counts, refused)
            if not _is_allowed(pair[0] + pair[1], byte_of):
                refused.add(pair)
                continue
        merges.append(pair)
        for index in sorted(users[pair]):
            _count_pairs(spellings[index], -counts[index], index, pair_counts, users)
            spellings[index] = _merged(spellings[index], pair)
            _count_pairs(spellings[index], counts[index], index, pair_counts, users)
    return merges


def _count_pairs(
    spelling: list[str],
    count: int,
    index: int,
    pair_counts: Counter[Pair],
    users: defaultdict[Pair, set[int]],
) -> None:
    for pair in pairwise(spelling):
        pair_counts[pair] += count
        if count > 0:
            users[pair].add(index)
        elif pair_counts[pair] == 0:
            del pair_counts[pair]


def _commonest(pair_counts: Counter[Pair], refused: set[Pair]) -> Pair:
    """The pair with the highest count; among equals, the first in the alphabet."""
    candidates = ((-count, pair) for pair, count in pair_counts.items() if pair not in refused)
    count, pair = min(candidates, default=(0, WITHHELD_PAIR))
    if -count < 2:
        raise ValueError("no pair of tokens occurs twice any more; ask for a smaller vocabulary")
    return pair


def _merged(spelling: list[str], pair: Pair) -> list[str]:
    merged: list[str] = []
    for symbol in spelling:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


def _is_allowed(token: str, byte_of: dict[str, int]) -> bool:
    """Whole characters or one incomplete character, and not too long beyond ASCII.

    So a token never holds the end of one character and the start of another, and text that is
    streamed token by token looks tidy.
    """
    data = bytes(byte_of[character] for character in token)
    if max(data) > 0x7F and len(data) > LONGEST_NON_ASCII:
        return False
    is_lead_byte_first = data[0] >= 0xC0
    is_incomplete = is_lead_byte_first and all(0x80 <= byte < 0xC0 for byte in data[1:])
    try:
        data.decode()
    except UnicodeDecodeError:
        return is_incomplete
    return True


def _byte_of_character() -> dict[str, int]:
    """The byte alphabet: printable bytes stand for themselves, the others for 256, 257, ..."""
    is_printable = [
        33 <= byte <= 126 or (161 <= byte <= 255 and byte != 173) for byte in range(256)
    ]
    hidden = (byte for byte in range(256) if not is_printable[byte])
    table = {chr(byte): byte for byte in range(256) if is_printable[byte]}
    return table | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, as transformers 4 and 5 read them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE_FILE.read_text(encoding="utf-8"),
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "errors": "replace",
        "model_max_length": max_length,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token, "lstrip": False, "normalized": False, "rstrip": False,
                "single_word": False, "special": token in CONTROL_TOKENS,
            }
            for token in (*CONTROL_TOKENS, *VISIBLE_TOKENS)
        },
    }  # fmt: skip
    text = json.dumps(config, ensure_ascii=False, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
