"""Qwen3, written out in full.

        input_ids ─> embed_tokens
                          │
                          ├──> input_layernorm ──> self_attn ──┐
                          + <──────────────────────────────────┘
                          ├──> post_attention_layernorm ──> mlp ──┐
                          + <─────────────────────────────────────┘
                          │       ... num_hidden_layers times
                          └──> norm ──> lm_head ──> logits

The vertical line is the residual stream. Each norm of the picture but the first also does the
addition before it, so a layer
returns two tensors: its output, not yet added, and the stream.

Modules have the same names as in the checkpoint: `model.layers.0.self_attn.q_norm.weight`. Where
one matrix merges several of the checkpoint, its `MergedLinear` has their names.

All tokens of a step are one flat batch; only `Attention` needs to know which sequence a token
belongs to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention, AttentionBackend
from nanovllm.layers.embed_head import LMHead, VocabEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear, MergedLinear, RowLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding, Rotation
from nanovllm.parallel.tensor_parallel import ALONE, TensorParallel

if TYPE_CHECKING:
    from nanovllm.utils.model_config import ModelConfig


class Qwen3Attention(nn.Module):
    """Project, norm each head, rotate, attend, project back; for the heads of this rank."""

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, parallel: TensorParallel
    ) -> None:
        super().__init__()
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = config.head_dim
        q_rows = parallel.split_heads(num_heads, head_dim)
        kv_rows = parallel.split_heads(num_kv_heads, head_dim)
        qkv_rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        self.qkv_proj = MergedLinear(config.hidden_size, qkv_rows)
        self.o_proj = RowLinear(num_heads * head_dim, config.hidden_size, parallel)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
        num_heads, num_kv_heads = q_rows.size // head_dim, kv_rows.size // head_dim  # this rank's
        self.attn = Attention(num_heads, num_kv_heads, head_dim, backend)

    def forward(self, hidden_states: Tensor, rotation: Rotation) -> Tensor:
        """(num_tokens, hidden_size) -> (num_tokens, hidden_size)."""
        attn = self.attn
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, attn.head_dim))
        q, k, v = qkv.split((attn.num_heads, attn.num_kv_heads, attn.num_kv_heads), dim=1)
        q = rotation.apply(self.q_norm(q))  # (num_tokens, num_heads, head_dim)
        k = rotation.apply(self.k_norm(k))  # (num_tokens, num_kv_heads, head_dim)
        attended: Tensor = attn(q, k, v)  # (num_tokens, num_heads, head_dim)
        output: Tensor = self.o_proj(attended.flatten(1))
        return output


class Qwen3MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        rows = parallel.split(0, config.intermediate_size)  # the same rows of gate and up
        self.gate_up_proj = MergedLinear(config.hidden_size, {"gate_proj": rows, "up_proj": rows})
        self.act_fn = SiluAndMul()
        self.down_proj = RowLinear(config.intermediate_size, config.hidden_size, parallel)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(num_tokens, hidden_size) -> (num_tokens, hidden_size)."""
        output: Tensor = self.down_proj(self.act_fn(self.gate_up_proj(hidden_states)))
        return output


class Qwen3DecoderLayer(nn.Module):
    """Attention, then MLP. A norm comes before each; the output of each is added to the stream."""

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.self_attn = Qwen3Attention(config, backend, parallel)
        self.mlp = Qwen3MLP(config, parallel)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        """Compute one layer.

        Args:
            hidden_states: (num_tokens, hidden_size), output of the previous layer, not yet added.
            residual: (num_tokens, hidden_size), the stream; None before the first layer.
            rotation: of the step's positions.

        Returns:
            The output of this layer, not yet added, and the stream.
        """
        hidden_states, residual = self.input_layernorm.add_and_norm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states, rotation)
        hidden_states, residual = self.post_attention_layernorm.add_and_norm(
            hidden_states, residual
        )
        return self.mlp(hidden_states), residual


class Qwen3Model(nn.Module):
    """Everything but the head."""

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, parallel)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, backend, parallel) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(
            config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling
        )

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """(num_tokens,) each -> (num_tokens, hidden_size)."""
        rotation: Rotation = self.rotary_emb(positions)
        hidden_states: Tensor = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, rotation)
        return self.norm.add_and_norm(hidden_states, residual)[0]


class Qwen3ForCausalLM(nn.Module):
    """Qwen3 with its head. Call it inside a `forward_context`; fill it with `load_model` first.

    With tensor parallelism this is one rank's part: all ranks must call it together, with the same
    tokens.

    Args:
        config: the model's config. Positions go from 0 to its `max_position_embeddings`, exclusive.
        backend: computes the attention.
        parallel: which part of the model this rank has.
    """

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, parallel: TensorParallel = ALONE
    ) -> None:
        super().__init__()
        self.model = Qwen3Model(config, backend, parallel)
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, parallel)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute the hidden states of a step's new tokens.

        Args:
            input_ids: (num_tokens,) int64, the new tokens of all sequences, one after another.
            positions: (num_tokens,) int64, each token's index in its sequence.

        Returns:
            (num_tokens, hidden_size), in the model's dtype.
        """
        hidden_states: Tensor = self.model(input_ids, positions)
        return hidden_states

    def pack(self) -> None:
        """Pack the loaded weights where that is faster (`layers/packed_weight.py`)."""
        for module in self.modules():
            if isinstance(module, Linear | LMHead):
                module.pack()

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """(num_tokens, hidden_size) -> (num_sampled, vocab_size) float32, on rank 0."""
        logits: Tensor = self.lm_head(hidden_states)
        return logits
