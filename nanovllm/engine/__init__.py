"""The engine: what to compute (scheduler, pages) and how (runner, tensors)."""
