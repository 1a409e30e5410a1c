"""Triton kernels: a decode step in a few large kernels.

Starting and ending a kernel takes about 1 us, and a decode step in plain torch launches about forty
in each layer. Here it is seven. Each arrow is a tensor in the GPU's memory; what is inside a box
stays on the chip:

     stream ─────────┬───────────────────────────────────────────┐
                     v                                           │
         +----------------------+                                │
         | norm, q k v products |  skinny_matmul                 │
         +----------------------+                                │
                     │ qkv                                       │
                     v                                           │
         +----------------------+                                │
         | q, k: norm and rotate|  rotary ──> k_cache, v_cache   │
         +----------------------+                  │             │
                     │ q                           │             │
                     v                             │             │
         +----------------------+                  │             │
         | attend to a share of |  <───────────────┘             │
         | the contexts; combine|  paged_attention (2 kernels)   │
         +----------------------+                                │
                     │ attended                                  │
                     v                                           │
         +----------------------+                                │
         | o product, addition  |  <─────────────────────────────┘
         +----------------------+  skinny_matmul
                     │ stream ───────────────────────────────────┐
                     v                                           │
         +----------------------+                                │
         | norm, gate and up    |                                │
         | products, silu * up  |  skinny_matmul                 │
         +----------------------+                                │
                     │                                           │
                     v                                           │
         +----------------------+                                │
         | down product,        |  <─────────────────────────────┘
         | addition             |  skinny_matmul
         +----------------------+
                     │ stream

This is for one row. With 2 to 16 rows, the norms are separate kernels, `norm.add_rms_norm`. With
more rows, nothing is fused into the products: the norm does the addition before it, and
`activation.silu_and_mul` comes between gate-up and down. Up to 256 rows, o and down use
`split_matmul`, and the next norm adds up its parts; all other products use cuBLAS. Once per step,
`attention_plan` divides the contexts among programs. After the last layer, `sampler.sample` samples
the tokens.

`grid` computes how work is divided into programs. It imports no Triton, so it can be tested on any
machine; the other modules are imported on GPUs only. Each public function names the plain torch
code that is its oracle.

The kernels work on tensors only. They never fall back to another implementation: what a kernel
cannot do is a ValueError.
"""
