"""What ships with nanovllm: a tiny, real Qwen3 checkpoint.

This module knows where the checkpoint lies. It does not read it, and it does not know how it was
made: that is the recipe's business (`make tiny-model`), which lives in the source
tree only.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["TINY_QWEN3"]

TINY_QWEN3 = Path(__file__).resolve().parent / "tiny-qwen3"
"""The folder of the tiny Qwen3: config, bf16 weights, tokenizer, model card."""
