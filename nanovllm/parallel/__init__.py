"""Tensor parallelism: several processes share one model. A first reader may skip it."""
