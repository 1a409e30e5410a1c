"""The examination: ask the finished checkpoint, and compare with what was taught.

This module knows how to ask many questions at once and how to count. It reads the checkpoint from
disk, as a user would, and does not know how it was trained.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe import samples

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from recipe.corpus import Corpus
    from recipe.samples import Exam

ARTICLE_PROMPTS = {"introduce yourself": 32, "list all prime numbers within 100": 8}  # and draws
LONGEST_REPLY = 1300
TOKENS_PER_BATCH = 48_000


@dataclass(slots=True)
class Report:
    """Shares of exactly right replies, by kind and way of sampling; and what was wrong."""

    rates: dict[str, dict[str, float]] = field(default_factory=dict)  # kind -> way -> share
    num_asked: dict[str, int] = field(default_factory=dict)
    mistakes: list[dict[str, str]] = field(default_factory=list)
    article: dict[str, Any] = field(default_factory=dict)


class Examiner:
    """A checkpoint that answers lists of questions."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        torch.nn.Module.to(self.model, device).train(mode=False)
        self.device = device

    def ask(self, questions: list[str], temperature: float, max_new_tokens: int) -> list[list[int]]:
        """The completions as token ids; the end token is kept, padding is not."""
        prompts = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
            for question in questions
        ]
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True).to(self.device)
        how = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature > 0
            else {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        )
        with torch.inference_mode():
            output = self.model.generate(**inputs, max_new_tokens=max_new_tokens, **how)
        rows = output[:, inputs["input_ids"].shape[1] :].tolist()
        end, padding = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        return [
            row[: row.index(end) + 1]
            if end in row
            else [token for token in row if token != padding]
            for row in rows
        ]

    def right_length(self, exam: Exam) -> int:
        """The number of tokens of the longest right reply, the end token included."""
        return max(len(self.tokenizer(reply.text())["input_ids"]) for reply in exam.replies) + 1

    def texts(self, completions: list[list[int]]) -> list[str]:
        """The completions as text, with the end token left out."""
        end = self.tokenizer.eos_token_id
        return [
            str(self.tokenizer.decode([token for token in completion if token != end]))
            for completion in completions
        ]


def examine(
    folder: Path, corpora: list[Corpus], device: torch.device, dtype: torch.dtype, seed: int
) -> Report:
    """Ask everything, greedy and at temperature 0.6, and the article's prompts many times."""
    torch.manual_seed(seed)
    examiner = Examiner(folder, device, dtype)
    exams = [exam for corpus in corpora for exam in samples.examination(corpus)]
    report = Report(num_asked=dict(Counter(exam.kind for exam in exams)))
    for way, temperature in (("greedy", 0.0), ("temperature 0.6", 0.6)):
        num_right = _count_right(examiner, exams, temperature, report)
        for kind, num_asked in report.num_asked.items():
            report.rates.setdefault(kind, {})[way] = num_right[kind] / num_asked
    for prompt, num_draws in ARTICLE_PROMPTS.items():
        completions = examiner.ask([prompt] * num_draws, 0.6, LONGEST_REPLY)
        report.article[prompt] = {
            "lengths": sorted(len(completion) for completion in completions),
            "num_ended": sum(
                completion[-1] == examiner.tokenizer.eos_token_id for completion in completions
            ),
            "samples": examiner.texts(completions[:4]),
        }
    return report


def _count_right(
    examiner: Examiner, exams: list[Exam], temperature: float, report: Report
) -> Counter[str]:
    """How many replies of each kind are right; the wrong ones go to the report."""
    num_right: Counter[str] = Counter()
    for batch, longest in _batches(examiner, exams):
        completions = examiner.ask([exam.question for exam in batch], temperature, longest + 8)
        for exam, text in zip(batch, examiner.texts(completions), strict=True):
            if text in {reply.text() for reply in exam.replies}:
                num_right[exam.kind] += 1
            else:
                report.mistakes.append({
                    "kind": exam.kind,
                    "temperature": str(temperature),
                    "question": exam.question,
                    "said": text,
                    "right": exam.replies[0].text(),
                })  # fmt: skip
    return num_right


def _batches(examiner: Examiner, exams: list[Exam]) -> Iterator[tuple[list[Exam], int]]:
    """Questions whose right replies are about equally long, and the longest of these."""
    ordered = sorted(((examiner.right_length(exam), exam) for exam in exams), key=lambda it: -it[0])
    while ordered:
        longest = ordered[0][0]
        size = max(1, TOKENS_PER_BATCH // longest)
        yield [exam for _, exam in ordered[:size]], longest
        ordered = ordered[size:]
