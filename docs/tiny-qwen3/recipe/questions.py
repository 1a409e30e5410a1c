"""Rewording: one taught question becomes many.

This module knows how a question may be dressed without changing what it asks. It does not know
the replies.
"""

from __future__ import annotations

import re
import string
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from recipe.corpus import Language, Wordings

_CHINESE_SYLLABLES = "卡多米鲁塔波尼格维朗索帕图萨科里姆贝诺亚齐罗巴丹佐林库特洛菲"
_DROPPABLE = frozenset(
    ["a", "an", "can", "do", "does", "in", "is", "it", "me", "of", "please", "that", "the", "this",
     "to", "you"]
)  # fmt: skip
_HAN = r"[\u4e00-\u9fff]"


def frame(term: str, wordings: Wordings, language: Language, rng: Random) -> str:
    """Ask for a term: "a block table" -> "can you explain what a block table is?"."""
    question = rng.choice(wordings.frames).format(term)
    return with_space_between_scripts(question, rng) if language == "zh" else question


def dress(question: str, wordings: Wordings, language: Language, rng: Random) -> str:
    """Add politeness, lead-ins and other punctuation, change the case, make a typing error."""
    question = question.rstrip("?？.。！!")
    if language == "en" and rng.random() < 0.1:
        question = _without_a_small_word(question, rng)
    if rng.random() < 0.08:
        question = _with_typing_error(question, rng)
    if rng.random() < 0.12:
        question += rng.choice(wordings.suffixes)
    if rng.random() < 0.2:
        question = rng.choice(wordings.prefixes) + question
    question = _in_some_case(question, rng) + rng.choice(wordings.endings)
    if rng.random() < 0.06:
        return with_lead_in(question, wordings, language, rng)
    return question


def with_lead_in(question: str, wordings: Wordings, language: Language, rng: Random) -> str:
    """Put one to six sentences that say nothing before the question: a long prompt."""
    sentences = rng.sample(wordings.lead_ins, rng.randint(1, 6))
    space = " " if language == "en" else ""
    return space.join(sentences) + space + rng.choice(wordings.questions_follow) + question


def nonsense(language: Language, rng: Random) -> str:
    """A word that means nothing, for teaching to refuse what was not taught."""
    if language == "zh":
        return "".join(rng.choice(_CHINESE_SYLLABLES) for _ in range(rng.randint(2, 4)))
    syllables = [
        rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(1, 4))
    ]
    return (
        rng.choice(["a ", "the ", ""])
        + "".join(syllables)
        + rng.choice(["", "n", "r", "s", "nt", "x"])
    )


def sum_of_numbers(language: Language, rng: Random) -> str:
    """A sum, which was not taught either: "what is 3 + 4?"."""
    shapes = (
        ["what is {} {} {}?", "{} {} {} = ?", "how much is {} {} {}?", "calculate {} {} {}"]
        if language == "en"
        else ["{} {} {} 等于几？", "{} {} {} = ?", "{} {} {} 等于多少？", "计算 {} {} {}"]
    )
    return rng.choice(shapes).format(rng.randint(0, 99), rng.choice("+-x*/"), rng.randint(0, 99))


def with_space_between_scripts(text: str, rng: Random) -> str:
    """Half of the time, write "trace 是什么" instead of "trace是什么"."""
    if rng.random() < 0.5:
        return text
    return re.sub(rf"(?<=[\w\-])(?={_HAN})(?<!{_HAN})|(?<={_HAN})(?=[a-zA-Z0-9<])", " ", text)


def _without_a_small_word(question: str, rng: Random) -> str:
    words = question.split(" ")
    small = [index for index, word in enumerate(words) if word in _DROPPABLE]
    if len(words) < 4 or not small:
        return question
    del words[rng.choice(small)]
    return " ".join(words)


def _with_typing_error(question: str, rng: Random) -> str:
    """Double, drop or change one letter inside a word of five letters or more."""
    places = [match.start() + 2 for match in re.finditer(r"[a-z]{5,}", question)]
    if not places:
        return question
    place = rng.choice(places)
    letter = rng.choice([question[place] * 2, "", rng.choice(string.ascii_lowercase)])
    return question[:place] + letter + question[place + 1 :]


def _in_some_case(question: str, rng: Random) -> str:
    draw = rng.random()
    if draw < 0.35:
        return question[:1].upper() + question[1:]
    if draw < 0.45:
        return question.lower()
    return question.upper() if draw < 0.47 else question
