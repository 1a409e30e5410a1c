"""FusedQwen3: the same Qwen3 with the same weights, in fewer, larger GPU kernels.

This module computes what `qwen3.py` does, with the kernels of `gpu/kernels`. The numbers must be
the same up to rounding; the plain model is its oracle.

        qwen3.py                                   here, many rows          here, few rows
        input_layernorm.add_and_norm               add_rms_norm          ┐
        qkv_proj                                   cuBLAS                ┘  skinny_matmul
        q_norm, k_norm, rotation.apply, write_kv   qk_norm_rope_write       the same
        backend.prefill / decode                   the same                 the same
        o_proj                                     split_matmul, cuBLAS  ┐
        (the addition of the next norm)            in the next norm      ┘  skinny_matmul
        post_attention_layernorm.add_and_norm      add_rms_norm          ┐
        gate_up_proj                               cuBLAS                │  skinny_matmul
        act_fn                                     silu_and_mul          ┘
        down_proj                                  split_matmul, cuBLAS  ┐
        (the addition of the next norm)            in the next norm      ┘  skinny_matmul

"Few rows" is a decode of few sequences: there a product takes as long as reading its weight, and
cuBLAS reads slowly. Up to 256 rows, cuBLAS is slow only where it must split a product and add up
the parts: there `split_matmul` is used, and the next norm adds up the parts. With several ranks, an
all_reduce comes between a product and the addition: always the left column, and cuBLAS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch.nn import functional

from nanovllm.gpu.kernels.activation import silu_and_mul
from nanovllm.gpu.kernels.grid import choose_split_tiling
from nanovllm.gpu.kernels.launch import num_multiprocessors, shared_memory_bytes, starts_early
from nanovllm.gpu.kernels.norm import add_rms_norm
from nanovllm.gpu.kernels.rotary import qk_norm_rope_write
from nanovllm.gpu.kernels.skinny_matmul import is_skinny, skinny_matmul
from nanovllm.gpu.kernels.split_matmul import split_matmul
from nanovllm.layers.context import get_context

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.layers.context import Context
    from nanovllm.layers.linear import Linear
    from nanovllm.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3ForCausalLM


class FusedQwen3:
    """Call it like the plain model.

    Args:
        model: on a GPU, with its weights loaded. Each step needs its KV cache.
    """

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self.model = model
        self.layers = cast("list[Qwen3DecoderLayer]", list(model.model.layers))
        self.parallel = model.lm_head.parallel
        self.cos_sin_table = model.model.rotary_emb.cos_sin_table

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """As `Qwen3ForCausalLM.forward`: (num_tokens,) each -> (num_tokens, hidden_size)."""
        hidden: Tensor = self.model.model.embed_tokens(input_ids)
        if self.parallel.world_size == 1 and is_skinny(hidden.shape[0]):
            return self._few_rows(hidden, positions)
        return self._many_rows(hidden, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """As `Qwen3ForCausalLM.compute_logits`, but in the model's own dtype."""
        head = self.model.lm_head
        logits_indices = get_context().logits_indices
        if logits_indices is not None:
            hidden_states = hidden_states.index_select(0, logits_indices)
        logits = functional.linear(hidden_states, head.weight)
        return self.parallel.gather(logits)[:, : head.partition.whole]

    def write_logits(self, hidden_states: Tensor, logits: Tensor) -> None:
        """Compute the logits of every row into an existing tensor."""
        if self.parallel.world_size == 1:
            torch.mm(hidden_states, self.model.lm_head.weight.T, out=logits)
        elif self.parallel.rank == 0:
            logits.copy_(self.compute_logits(hidden_states))
        else:
            self.compute_logits(hidden_states)

    def _few_rows(self, stream: Tensor, positions: Tensor) -> Tensor:
        context = get_context()
        for layer in self.layers:
            attention, mlp = layer.self_attn, layer.mlp
            norm = layer.input_layernorm
            qkv = skinny_matmul(
                stream, attention.qkv_proj.weight, norm_weight=norm.weight, eps=norm.eps
            )
            attended = self._attend(attention, qkv, positions, context)
            stream = skinny_matmul(attended, attention.o_proj.weight, residual=stream)
            norm = layer.post_attention_layernorm
            product = skinny_matmul(
                stream,
                mlp.gate_up_proj.weight,
                norm_weight=norm.weight,
                eps=norm.eps,
                is_gate_up=True,
            )
            stream = skinny_matmul(product, mlp.down_proj.weight, residual=stream)
        norm = self.model.model.norm
        return add_rms_norm(stream, None, norm.weight, norm.eps)[0]

    def _many_rows(self, hidden: Tensor, positions: Tensor) -> Tensor:
        context = get_context()
        stream: Tensor | None = None
        for layer in self.layers:
            norm = layer.input_layernorm
            normed, stream = add_rms_norm(hidden, stream, norm.weight, norm.eps)
            attention, mlp = layer.self_attn, layer.mlp
            attended = self._attend(attention, attention.qkv_proj(normed), positions, context)
            hidden = self._multiply(attended, attention.o_proj)
            norm = layer.post_attention_layernorm
            normed, stream = add_rms_norm(hidden, stream, norm.weight, norm.eps)
            hidden = self._multiply(silu_and_mul(mlp.gate_up_proj(normed)), mlp.down_proj)
        norm = self.model.model.norm
        return add_rms_norm(hidden, stream, norm.weight, norm.eps)[0]

    def _multiply(self, x: Tensor, linear: Linear) -> Tensor:
        """Return linear(x), or where that is faster its parts, which `add_rms_norm` adds up."""
        if self.parallel.world_size == 1 and starts_early(x.device):
            num_outputs, size = linear.weight.shape
            multiprocessors = num_multiprocessors(x.device)
            tiling = choose_split_tiling(
                *(len(x), num_outputs, size, x.element_size()),
                *(multiprocessors, shared_memory_bytes(x.device)),
            )
            if tiling is not None:
                return split_matmul(x, linear.weight, tiling)
        output: Tensor = linear(x)
        return output

    def _attend(
        self, attention: Qwen3Attention, qkv: Tensor, positions: Tensor, context: Context
    ) -> Tensor:
        """(num_tokens, merged q, k, v heads) -> (num_tokens, num_heads * head_dim)."""
        inner = attention.attn
        k_cache, v_cache = inner.k_cache, inner.v_cache
        if k_cache is None or v_cache is None:
            raise RuntimeError("the KV cache must be set before a fused step")
        num_heads, num_kv_heads = inner.num_heads, inner.num_kv_heads
        k = None
        if context.block_tables is None:  # nothing is cached: attention uses the new K and V
            k = torch.empty(
                (qkv.shape[0], num_kv_heads, inner.head_dim), dtype=qkv.dtype, device=qkv.device
            )
        q = qk_norm_rope_write(
            *(qkv, attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps),
            *(self.cos_sin_table, positions, context.slot_mapping, k_cache, v_cache),
            *(num_heads, num_kv_heads, k),
        )
        if context.phase == "decode":
            attended = inner.backend.decode(
                q, k_cache=k_cache, v_cache=v_cache, scale=inner.scale, context=context
            )
        else:
            keys, values = k_cache, v_cache
            if k is not None:
                heads = qkv.view(len(qkv), -1, inner.head_dim)
                keys, values = k, heads[:, num_heads + num_kv_heads :]
            attended = inner.backend.prefill(q, keys, values, inner.scale, context)
        return attended.flatten(1)
