"""How the tiny Qwen3 is made: its text, its tokenizer, its training, its examination.

In docs/tiny-qwen3, `python -m recipe --out DIR` does all of it, with fixed seeds. Nothing in the
engine imports this package.
"""
