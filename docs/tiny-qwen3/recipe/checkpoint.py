"""Writing the checkpoint: config, weights, generation defaults, model card.

This module knows the files of a Hugging Face model folder, in the form that transformers 4 and 5
both read. It does not know how the weights came about.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from recipe import train
from recipe.tokenizer import END_OF_TEXT, TURN_END, save_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

    from recipe.evaluate import Report
    from recipe.train import Plan, TrainingResult

CARD_TEMPLATE = Path(__file__).with_name("card.md")


def save_checkpoint(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write everything but the model card; the weights in bf16, the tied head left out."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = tokenizer.get_vocab()
    end_ids = [vocab[TURN_END], vocab[END_OF_TEXT]]
    save_tokenizer(tokenizer, folder, train.MAX_POSITION)
    _write_json(folder / "config.json", _config(model, end_ids))
    _write_json(folder / "generation_config.json", {
        "bos_token_id": end_ids[1], "pad_token_id": end_ids[1], "eos_token_id": end_ids,
        "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
    })  # fmt: skip
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in sorted(model.state_dict().items())
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file makes it private to its owner


def _config(model: Qwen3ForCausalLM, end_ids: list[int]) -> dict[str, Any]:
    """config.json with the names of the published Qwen3 models."""
    config = model.config
    copied = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps",
        "max_position_embeddings", "tie_word_embeddings", "attention_bias", "attention_dropout",
        "initializer_range",
    )  # fmt: skip
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in copied},
        "rope_theta": train.ROPE_THETA,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_hidden_layers,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": end_ids[1],
        "eos_token_id": end_ids[0],
    }


def save_card(  # noqa: PLR0917 - a card has many facts
    folder: Path,
    model: Qwen3ForCausalLM,
    plan: Plan,
    result: TrainingResult,
    report: Report,
    where: str,
) -> None:
    """Write README.md from the template `card.md` and the numbers of this run."""
    rows = [
        f"| {kind} | {report.num_asked[kind]} | "
        + " | ".join(f"{share:.1%}" for share in rates.values()) + " |"
        for kind, rates in report.rates.items()
    ]  # fmt: skip
    introductions = report.article["introduce yourself"]
    text = CARD_TEMPLATE.read_text(encoding="utf-8").format(
        num_parameters=f"{model.num_parameters():,}",
        vocab_size=model.config.vocab_size,
        num_bytes=f"{(folder / 'model.safetensors').stat().st_size:,}",
        steps=plan.steps,
        seed=plan.seed,
        num_tokens=f"{result.num_tokens:,}",
        seconds=f"{result.seconds:.0f}",
        speed=f"{result.num_tokens / result.seconds:,.0f}",
        loss=f"{result.final_loss:.4f}",
        where=where,
        rates="\n".join(rows),
        num_draws=len(introductions["lengths"]),
        num_ended=introductions["num_ended"],
        shortest=introductions["lengths"][0],
        longest=introductions["lengths"][-1],
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
