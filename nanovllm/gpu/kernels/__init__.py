"""Triton kernels: a decode step in few, large pieces.

A kernel that only starts and ends costs about 1 us, and a decode step in plain torch launches some
forty of them a layer. Here a layer is seven. Each arrow is a tensor in the GPU's memory; what
happens inside a box never leaves the chip:

     stream ─────────┬───────────────────────────────────────────┐
                     v                                           │
         +----------------------+                                │
         | norm, q k v products |  skinny_matmul                 │
         +----------------------+                                │
                     │ qkv                                       │
                     v                                           │
         +----------------------+                                │
         | q norm, k norm, turn |  rotary ──> k_cache, v_cache   │
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

That is with one row. With 2 to 16, the norms are kernels of their own, `norm.add_rms_norm`. With
more, what was fused into the products stands alone: the norm does the addition before it, and
`activation.silu_and_mul` comes between gate-up and down. Up to 256 rows, o and down are products of
`split_matmul`, whose parts the norm adds up; the others, and all beyond, are cuBLAS's. How the
contexts are shared out, `attention_plan` says once a step. After the last layer, `sampler.sample`
goes from logits to tokens.

`grid` decides how work is cut into programs, without Triton: it can be read and tested anywhere.
The other modules import Triton, and nobody imports them but who has a GPU. Each public function
names the plain torch code that computes the same; that code is its oracle.

Knows nothing of the model's modules, of contexts and of sequences: tensors in, tensors out. Never
takes another path silently: what a kernel cannot do, it refuses with a ValueError.
"""
