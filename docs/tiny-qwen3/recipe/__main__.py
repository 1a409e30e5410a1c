"""`python -m recipe --out DIR`: make the tiny Qwen3 anew.

Learns the tokenizer, trains the model, writes the checkpoint, examines it, writes the model card.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

from recipe import corpus, samples
from recipe.checkpoint import save_card, save_checkpoint
from recipe.encoding import Encoder
from recipe.evaluate import Report, examine
from recipe.tokenizer import train_tokenizer
from recipe.train import Plan, train

VOCAB_SIZE = 3072
STEPS = 2500


def main() -> None:
    """Run the whole recipe."""
    options = _options()
    device = _device(options.device)
    corpora = [corpus.load_corpus(language) for language in corpus.LANGUAGES]
    texts = [text for one in corpora for text in samples.texts_for_tokenizer(one)]
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    print(f"tokenizer: {VOCAB_SIZE} tokens", flush=True)

    plan = Plan(steps=options.steps, seed=options.seed)
    model, result = train(Encoder(tokenizer), corpora, plan, device, _say)
    save_checkpoint(model, tokenizer, options.out)
    print(f"model: {model.num_parameters():,} parameters in {options.out}", flush=True)

    report = examine(options.out, corpora, device, torch.float32, options.seed)
    save_card(options.out, model, plan, result, report, _where(device))
    _print_report(report)
    if options.report:
        text = json.dumps(
            {"rates": report.rates, "article": report.article, "mistakes": report.mistakes},
            ensure_ascii=False,
            indent=1,
        )
        options.report.write_text(text, encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipe", description="Train the tiny Qwen3 that ships."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--report", type=Path, help="also write the examination, with mistakes, as JSON"
    )
    return parser.parse_args()


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _where(device: torch.device) -> str:
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}"
    return f"{torch.get_num_threads()} CPU threads ({platform.machine()})"


def _say(line: str) -> None:
    print(line, flush=True)


def _print_report(report: Report) -> None:
    for kind, rates in report.rates.items():
        shares = "  ".join(f"{way} {share:6.1%}" for way, share in rates.items())
        print(f"{kind:16} {report.num_asked[kind]:4}  {shares}")
    for prompt, facts in report.article.items():
        lengths = facts["lengths"]
        print(
            f"\n{prompt!r}: {lengths[0]} to {lengths[-1]} tokens, "
            f"{facts['num_ended']} of {len(lengths)} end by EOS\n{facts['samples'][0]}"
        )


if __name__ == "__main__":
    main()
