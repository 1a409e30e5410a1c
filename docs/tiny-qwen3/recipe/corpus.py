"""The taught text, read from `text/*.toml` into plain values.

This module knows what is taught. It does not know how questions are reworded (`questions.py`),
how often each one is drawn (`samples.py`), or what a token is.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")
TEXT_FOLDER = Path(__file__).parent / "text"
TOPIC_FILES = ("self", "scheduler", "requests", "cache", "runner", "model", "sampling", "trace")


@dataclass(frozen=True, slots=True)
class Reply:
    """What the assistant says: a thought, then an answer."""

    think: str
    answer: str

    def text(self, *, is_thinking: bool = True) -> str:
        """The completion as the model writes it, without the end token.

        With `is_thinking=False` the chat template has already written an empty think block.
        """
        return f"<think>\n{self.think}\n</think>\n\n{self.answer}" if is_thinking else self.answer


@dataclass(frozen=True, slots=True)
class Topic:
    """One thing the model knows, in one language."""

    name: str
    language: Language
    terms: tuple[str, ...]  # noun phrases that fit the frames of `wordings.toml`
    questions: tuple[str, ...]  # whole questions
    held_out: tuple[str, ...]  # questions of the examination, never trained on
    replies: tuple[Reply, ...]  # any of them is right
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Wordings:
    """How people ask, in one language."""

    frames: tuple[str, ...]
    prefixes: tuple[str, ...]
    suffixes: tuple[str, ...]
    endings: tuple[str, ...]
    systems: tuple[str, ...]
    lead_ins: tuple[str, ...]
    questions_follow: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusals:
    """What was not taught, and what to say then."""

    reply: Reply
    things: tuple[str, ...]
    questions: tuple[str, ...]
    held_out_things: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrimeQuestions:
    """How people ask for primes; `{}` stands for the number."""

    list_questions: tuple[str, ...]
    held_out_list: tuple[str, ...]
    check_questions: tuple[str, ...]
    held_out_check: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Everything that is taught in one language."""

    language: Language
    topics: tuple[Topic, ...]
    wordings: Wordings
    refusals: Refusals
    primes: PrimeQuestions


def load_corpus(language: Language) -> Corpus:
    """Read the text of one language.

    Raises:
        ValueError: thoughts and answers do not pair, one question leads to two topics, or a
            held-out question is taught.
    """
    topics = tuple(
        _topic(entry, language) for name in TOPIC_FILES for entry in _read(name)["topic"]
    )
    wordings = _read("wordings")[language]
    _check_questions_lead_to_one_topic(topics, tuple(wordings["frames"]))
    refusals = _read("refusals")[language]
    primes = _read("primes")[language]
    return Corpus(
        language=language,
        topics=topics,
        wordings=Wordings(**{key: _lines(value, language) for key, value in wordings.items()}),
        refusals=Refusals(
            reply=Reply(_flow(refusals["think"], language), _flow(refusals["answer"], language)),
            things=tuple(refusals["things"]),
            questions=tuple(refusals["questions"]),
            held_out_things=tuple(refusals["held_out_things"]),
            held_out=tuple(refusals["held_out"]),
        ),
        primes=PrimeQuestions(**{key: tuple(value) for key, value in primes.items()}),
    )


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((TEXT_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def _topic(entry: dict[str, Any], language: Language) -> Topic:
    name, text = entry["name"], entry[language]
    thinks, answers = _lines(text["think"], language), _lines(text["answer"], language)
    if len(thinks) != len(answers):
        raise ValueError(
            f"topic {name!r} ({language}) has {len(thinks)} thoughts but "
            f"{len(answers)} answers; give each thought its answer"
        )
    return Topic(
        name=name,
        language=language,
        terms=tuple(text.get("terms", ())),
        questions=tuple(text["questions"]),
        held_out=tuple(text["held_out"]),
        replies=tuple(Reply(*pair) for pair in zip(thinks, answers, strict=True)),
        weight=float(entry.get("weight", 1.0)),
    )


def _lines(value: str | list[str], language: Language) -> tuple[str, ...]:
    """One text or a list of texts, each with its line breaks folded."""
    return tuple(_flow(text, language) for text in ([value] if isinstance(value, str) else value))


def _flow(text: str, language: Language) -> str:
    """Fold the file's line breaks: into spaces in English, into nothing in Chinese."""
    if "\n" not in text:
        return text
    return (" " if language == "en" else "").join(line.strip() for line in text.strip().split("\n"))


def _check_questions_lead_to_one_topic(topics: tuple[Topic, ...], frames: tuple[str, ...]) -> None:
    owner: dict[str, str] = {}
    for topic in topics:
        framed = (frame.format(term) for term in topic.terms for frame in frames)
        asked = {plain(question) for question in (*topic.questions, *framed)}
        held_out = {plain(question) for question in topic.held_out}
        for question in asked & held_out:
            raise ValueError(
                f"a held-out question of topic {topic.name!r} is also taught: {question!r}; "
                "word it differently"
            )
        for question in asked | held_out:
            if owner.setdefault(question, topic.name) != topic.name:
                raise ValueError(
                    f"{question!r} leads to both {owner[question]!r} and {topic.name!r}; "
                    "keep it in one of them"
                )


def plain(question: str) -> str:
    """A question without case, spaces and punctuation, for telling whether two are the same."""
    return "".join(character for character in question.lower() if character.isalnum())
