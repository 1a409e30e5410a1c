"""Drawing what is trained on: a conversation of one question and its reply.

This module knows how often each thing is taught, and what the examination asks. It does not know
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipe import primes, questions

if TYPE_CHECKING:
    from random import Random

    from recipe.corpus import Corpus, Reply, Topic

# What a drawn sample is about. The longest prime list is as long as twelve other samples.
SHARES = {"topic": 0.65, "refusal": 0.18, "prime_check": 0.105, "prime_list": 0.065}
LIMITS = tuple(range(10, primes.LARGEST + 1, 10))  # of the prime lists that are taught
LIMIT_WEIGHTS = tuple(0.1 if limit == primes.LARGEST else 1.0 / limit for limit in LIMITS)


@dataclass(frozen=True, slots=True)
class Sample:
    """A question, perhaps under a system prompt, and a reply to learn."""

    question: str
    reply: Reply
    system: str | None = None
    is_thinking: bool = True


@dataclass(frozen=True, slots=True)
class Exam:
    """A question of the examination and all replies that are right."""

    kind: str
    question: str
    replies: tuple[Reply, ...]


def draw(corpora: list[Corpus], rng: Random) -> Sample:
    """One sample, in either language."""
    corpus = rng.choice(corpora)
    kind = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
    if kind == "topic":
        question, reply = _from_topic(corpus, rng)
    elif kind == "refusal":
        question, reply = _refusal(corpus, rng)
    elif kind == "prime_check":
        question, reply = _prime_check(corpus, rng)
    else:
        question, reply = _prime_list(corpus, rng)
    return Sample(
        question=question,
        reply=reply,
        system=rng.choice(corpus.wordings.systems) if rng.random() < 0.12 else None,
        is_thinking=rng.random() >= 0.08,
    )


def _from_topic(corpus: Corpus, rng: Random) -> tuple[str, Reply]:
    topic = rng.choices(corpus.topics, weights=[topic.weight for topic in corpus.topics])[0]
    return ask(topic, corpus, rng), rng.choice(topic.replies)


def ask(topic: Topic, corpus: Corpus, rng: Random) -> str:
    """A question of the topic: often as written, often reworded."""
    wordings, language = corpus.wordings, corpus.language
    if topic.terms and rng.random() < 0.55:
        question = questions.frame(rng.choice(topic.terms), wordings, language, rng)
    else:
        question = rng.choice(topic.questions)
        if language == "zh":
            question = questions.with_space_between_scripts(question, rng)
    return question if rng.random() < 0.2 else questions.dress(question, wordings, language, rng)


def _refusal(corpus: Corpus, rng: Random) -> tuple[str, Reply]:
    wordings, language = corpus.wordings, corpus.language
    draw_of_kind = rng.random()
    if draw_of_kind < 0.35:
        question = rng.choice(corpus.refusals.questions)
    elif draw_of_kind < 0.4:
        question = questions.sum_of_numbers(language, rng)
    elif draw_of_kind < 0.75:
        question = questions.frame(rng.choice(corpus.refusals.things), wordings, language, rng)
    else:
        question = questions.frame(questions.nonsense(language, rng), wordings, language, rng)
    return questions.dress(question, wordings, language, rng), corpus.refusals.reply


def _prime_check(corpus: Corpus, rng: Random) -> tuple[str, Reply]:
    number = (
        rng.randint(0, primes.LARGEST)
        if rng.random() < 0.9
        else rng.randint(primes.LARGEST + 1, 999)
    )
    question = rng.choice(corpus.primes.check_questions).format(number)
    question = questions.dress(question, corpus.wordings, corpus.language, rng)
    return question, primes.check_reply(number, corpus.language)


def _prime_list(corpus: Corpus, rng: Random) -> tuple[str, Reply]:
    limit = rng.choices(LIMITS, weights=LIMIT_WEIGHTS)[0]
    question = rng.choice(corpus.primes.list_questions).format(limit)
    if rng.random() < 0.7:
        question = questions.dress(question, corpus.wordings, corpus.language, rng)
    return question, primes.list_reply(limit, corpus.language)


def examination(corpus: Corpus) -> list[Exam]:
    """Questions to ask after training: taught ones as written, and held-out ones."""
    refusals, asked, language = corpus.refusals, corpus.primes, corpus.language
    exams = [
        Exam(f"{kind} ({language})", question, topic.replies)
        for topic in corpus.topics
        for kind, group in (("taught", topic.questions), ("held-out", topic.held_out))
        for question in group
    ]
    things = [corpus.wordings.frames[0].format(thing) for thing in refusals.held_out_things]
    unknown = [*refusals.held_out, *things]
    exams += [Exam(f"unknown ({language})", question, (refusals.reply,)) for question in unknown]
    exams += [
        Exam(f"prime? ({language})", wording.format(n), (primes.check_reply(n, language),))
        for wording in asked.held_out_check
        for n in range(primes.LARGEST + 1)
    ]
    lists = [(asked.list_questions[0], limit) for limit in LIMITS]
    lists += [(wording, limit) for wording in asked.held_out_list for limit in (20, primes.LARGEST)]
    exams += [
        Exam(f"primes ({language})", wording.format(limit), (primes.list_reply(limit, language),))
        for wording, limit in lists
    ]
    return exams


def texts_for_tokenizer(corpus: Corpus) -> list[str]:
    """All taught text once or more: replies, questions, terms in all frames, system prompts.

    What is refused is left out: a word that was not taught should look like one.
    """
    wordings, language = corpus.wordings, corpus.language
    texts = [reply.text() for topic in corpus.topics for reply in topic.replies] * 4
    texts += [corpus.refusals.reply.text()] * 4
    for topic in corpus.topics:
        texts += [
            *topic.questions,
            *(question[:1].upper() + question[1:] for question in topic.questions),
        ]
        texts += [shape.format(term) for term in topic.terms for shape in wordings.frames[::4]]
    texts += [shape.format("nanovllm").capitalize() for shape in wordings.frames * 2]
    texts += [*wordings.systems, *wordings.lead_ins, *wordings.prefixes, *wordings.suffixes]
    texts += [shape.format(10) for shape in corpus.primes.list_questions * 3]
    texts += [shape.format(10) for shape in corpus.primes.check_questions * 3]
    texts += [primes.list_reply(primes.LARGEST, language).text()]
    texts += ["user\n", "assistant\n", "system\n"] * len(texts)
    return texts
