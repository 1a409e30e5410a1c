"""Training: AdamW on the drawn conversations, loss on what the assistant says.

This module knows the optimizer and the schedule. It does not know what is taught, and it writes
nothing.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from recipe import samples
from recipe.encoding import IGNORED, Encoder, batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from recipe.corpus import Corpus

ROPE_THETA = 1_000_000.0
MAX_POSITION = 4096
SAMPLES_PER_ROUND = 2048


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how hard to train."""

    steps: int
    seed: int = 0
    tokens_per_step: int = 4096
    learning_rate: float = 1.5e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    report_every: int = 100


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What came of it; losses are nats per assistant token, averaged over the last report."""

    final_loss: float
    num_tokens: int
    seconds: float


def model_config(vocab_size: int) -> Qwen3Config:
    """The shape of the tiny model: about five million parameters."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
    )


def train(
    encoder: Encoder,
    corpora: list[Corpus],
    plan: Plan,
    device: torch.device,
    say: Callable[[str], None],
) -> tuple[Qwen3ForCausalLM, TrainingResult]:
    """Train a fresh model from random weights."""
    torch.manual_seed(plan.seed)
    model = Qwen3ForCausalLM(model_config(encoder.tokenizer.get_vocab_size()))
    torch.nn.Module.to(model, device).train()
    optimizer = _optimizer(model, plan)
    losses: list[torch.Tensor] = []
    num_tokens, final_loss, start = 0, math.nan, time.perf_counter()
    stream = _batch_stream(encoder, corpora, plan)
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, plan)
        input_ids, labels = (tensor.to(device, non_blocking=True) for tensor in next(stream))
        losses.append(_train_step(model, optimizer, input_ids, labels))
        num_tokens += input_ids.numel()
        if (step + 1) % plan.report_every == 0 or step + 1 == plan.steps:
            final_loss = torch.stack(losses).mean().item()
            losses.clear()
            seconds = time.perf_counter() - start
            say(
                f"step {step + 1}/{plan.steps}  loss {final_loss:.4f}  "
                f"{num_tokens / seconds:,.0f} tokens/s  {seconds:.0f} s"
            )
    torch.nn.Module.train(model, mode=False)
    return model, TrainingResult(final_loss, num_tokens, time.perf_counter() - start)


def learning_rate(step: int, plan: Plan) -> float:
    """Up in a line, down in half a cosine, to 1 % of the peak."""
    if step < plan.warmup_steps:
        return plan.learning_rate * (step + 1) / plan.warmup_steps
    progress = (step - plan.warmup_steps) / max(1, plan.steps - plan.warmup_steps)
    return plan.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def _optimizer(model: Qwen3ForCausalLM, plan: Plan) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    gains = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": plan.weight_decay},
         {"params": gains, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )  # fmt: skip


def _batch_stream(
    encoder: Encoder, corpora: list[Corpus], plan: Plan
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rng = Random(plan.seed)
    while True:
        drawn = [samples.draw(corpora, rng) for _ in range(SAMPLES_PER_ROUND)]
        yield from batches(
            [encoder.encode(sample, rng) for sample in drawn], plan.tokens_per_step, rng
        )


def _train_step(
    model: Qwen3ForCausalLM,
    optimizer: torch.optim.AdamW,
    input_ids: torch.Tensor,  # (num_samples, longest)
    labels: torch.Tensor,
) -> torch.Tensor:
    targets = labels[:, 1:]
    is_said = targets != IGNORED
    with torch.autocast(input_ids.device.type, torch.bfloat16):
        hidden = model.model(input_ids=input_ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[is_said])  # (num_said, vocab_size)
    loss = functional.cross_entropy(logits.float(), targets[is_said])
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()
