"""The models, each written out in full, and the configuration that they are built from."""
