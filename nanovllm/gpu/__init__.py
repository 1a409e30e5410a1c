"""What runs on a GPU only: CUDA graphs, kernels, fused steps. A first reader may skip it."""
