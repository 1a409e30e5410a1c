"""Tiny random Qwen3 checkpoints, transformers' answer to them, and a hand-driven paged engine.

The driver keeps pages and block tables as an engine would, but is told every step, so that a test
can cut prompts where it likes. Its pages are hostile: full of NaN until written, handed out in
random order, and block 0, with which block tables are padded, is never anybody's.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from transformers import Qwen3Config
from transformers import Qwen3ForCausalLM as ReferenceQwen3

from nanovllm.gpu.attention_choice import make_attention_backend
from nanovllm.layers.attention import Attention
from nanovllm.layers.context import Context, forward_context
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.loader import load_model
from nanovllm.utils.model_config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

VOCAB_SIZE = 128


def make_reference(changes: Mapping[str, object] | None = None) -> ReferenceQwen3:
    """Return a tiny random Qwen3 of transformers, in fp32.

    The weights are large, so that the likeliest token is likeliest by far; the norms' are not 1.
    """
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    torch.manual_seed(0)
    reference = ReferenceQwen3(Qwen3Config.from_dict(settings | dict(changes or {})))
    reference.requires_grad_(requires_grad=False)
    for parameter in reference.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
    return reference


def save_reference(reference: ReferenceQwen3, folder: Path) -> Path:
    """Save a model as transformers does, and return the folder."""
    reference.save_pretrained(folder)
    return folder


def edit_config(folder: Path, changes: Mapping[str, object]) -> None:
    """Change fields of config.json; None takes one out."""
    file = folder / "config.json"
    content = json.loads(file.read_text(encoding="utf-8")) | dict(changes)
    kept = {name: value for name, value in content.items() if value is not None}
    file.write_text(json.dumps(kept), encoding="utf-8")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """Return the engine's model with a folder's weights."""
    model = Qwen3ForCausalLM(ModelConfig.from_folder(folder), make_attention_backend("sdpa"))
    model = model.to(dtype)
    load_model(model, folder)
    return model


def reference_logits(reference: ReferenceQwen3, token_ids: Sequence[int]) -> Tensor:
    """Return (num_tokens, vocab_size): transformers' logits, the whole text in one forward."""
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([token_ids])).logits[0]
    return logits


def reference_greedy(
    reference: ReferenceQwen3, token_ids: Sequence[int], num_new_tokens: int
) -> list[int]:
    """Return the tokens that transformers appends, each by a forward of the whole text."""
    text = list(token_ids)
    for _ in range(num_new_tokens):
        text.append(int(reference_logits(reference, text)[-1].argmax()))
    return text[len(token_ids) :]


def random_tokens(num_tokens: int, seed: int) -> list[int]:
    """Return a text of no meaning."""
    return random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens)


@dataclass(slots=True)
class PagedText:
    """What the driver knows of one sequence."""

    num_cached: int = 0
    block_table: list[int] = field(default_factory=list)


class PagedDriver:
    """Runs steps that the test dictates through a paged KV cache."""

    def __init__(self, model: Qwen3ForCausalLM, block_size: int, num_blocks: int = 64) -> None:
        self.model = model
        self.block_size = block_size
        self.texts: dict[int, PagedText] = {}
        self.free_blocks = list(range(1, num_blocks))
        random.Random(block_size).shuffle(self.free_blocks)
        for layer in model.modules():
            if isinstance(layer, Attention):
                shape = (num_blocks, block_size, layer.num_kv_heads, layer.head_dim)
                dtype = model.lm_head.weight.dtype
                layer.k_cache = torch.full(shape, torch.nan, dtype=dtype)
                layer.v_cache = torch.full(shape, torch.nan, dtype=dtype)

    def step(
        self,
        new_tokens: Mapping[int, Sequence[int]],
        phase: Literal["prefill", "decode"],
        logits_indices: Sequence[int] | None = None,
    ) -> Tensor:
        """Compute the next tokens of some texts; return the logits, (num_tokens, vocab_size)."""
        positions: list[int] = []
        slots: list[int] = []
        cu_seqlens_q, cu_seqlens_k = [0], [0]
        texts = [self.texts.setdefault(text_id, PagedText()) for text_id in new_tokens]
        has_context = phase == "decode" or any(text.num_cached for text in texts)
        for text, tokens in zip(texts, new_tokens.values(), strict=True):
            for position in range(text.num_cached, text.num_cached + len(tokens)):
                if position // self.block_size == len(text.block_table):
                    text.block_table.append(self.free_blocks.pop())
                block = text.block_table[position // self.block_size]
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
            text.num_cached += len(tokens)
            cu_seqlens_q.append(cu_seqlens_q[-1] + len(tokens))
            cu_seqlens_k.append(cu_seqlens_k[-1] + text.num_cached)
        width = max(len(text.block_table) for text in texts)
        tables = [text.block_table + [0] * (width - len(text.block_table)) for text in texts]
        context = Context(
            phase=phase,
            slot_mapping=torch.tensor(slots),
            cu_seqlens_q=torch.tensor(cu_seqlens_q, dtype=torch.int32),
            cu_seqlens_k=torch.tensor(cu_seqlens_k, dtype=torch.int32),
            max_seqlen_q=max(len(tokens) for tokens in new_tokens.values()),
            max_seqlen_k=max(text.num_cached for text in texts),
            context_lens=torch.tensor([t.num_cached for t in texts], dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32) if has_context else None,
            logits_indices=None if logits_indices is None else torch.tensor(logits_indices),
        )
        input_ids = torch.tensor([token for tokens in new_tokens.values() for token in tokens])
        with torch.inference_mode(), forward_context(context):
            hidden_states = self.model(input_ids, torch.tensor(positions))
            return self.model.compute_logits(hidden_states)
