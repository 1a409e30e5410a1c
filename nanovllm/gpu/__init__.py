"""What makes a GPU fast: graphs, kernels, fused steps. A first reader may skip it."""
