"""Helpers: checks of input, tokenizer, weight loader, devices. A first reader may skip it."""
