"""The engine: what to compute (scheduler, blocks) and how (runner, tensors)."""
