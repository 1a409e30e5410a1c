"""The models, each written out in full."""
