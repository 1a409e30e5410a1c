"""What ships with nanovllm: a tiny, real Qwen3 checkpoint.

`make tiny-model` trains it, from the recipe in docs/tiny-qwen3 of the source tree.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["TINY_QWEN3"]

TINY_QWEN3 = Path(__file__).resolve().parent / "tiny-qwen3"
"""The folder of the tiny Qwen3: config, bf16 weights, tokenizer, model card."""
