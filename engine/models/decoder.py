"""One decoder for all supported families; `ModelConfig` says which variation of each part a model uses.

    embed ─▶ x ─┬─ norm ─ qkv ─ (q/k norm) ─ rotate ─ attention ─ output ─ + ─┬─ norm ─ MLP ─ + ─▶ next layer
                └──────────────────────────────────────────────────────────┘  └───────────────┘

All tensors are ragged: dim 0 is the N tokens of a step, whatever request they belong to.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.base import AttentionStep
from engine.attention.kv_pages import KVPages, store_kv
from engine.models.config import ModelConfig


class Rotation:
    """Cosines and sines of a step's positions, [N, 1, head_dim], and their application."""

    def __init__(self, positions: torch.Tensor, inv_freq: torch.Tensor, factor: float, dtype: torch.dtype) -> None:
        angles = positions[:, None, None].float() * inv_freq
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self._cos = torch.cat((cos, cos), -1).to(dtype)
        self._sin = torch.cat((-sin, sin), -1).to(dtype)

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate [N, H, head_dim]: pairs are (i, i + head_dim / 2), as in transformers' `rotate_half`."""
        first, second = heads.chunk(2, -1)
        return heads * self._cos + torch.cat((second, first), -1) * self._sin


class Attention(nn.Module):
    """Attention with fused projections: one matrix for queries, keys and values."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim, self._eps = config.head_dim, config.norm_eps
        self._window = config.layer_windows[layer]
        self.qkv_proj = nn.Linear(
            config.hidden_size,
            (config.num_heads + 2 * config.num_kv_heads) * config.head_dim,
            bias=config.qkv_bias,
        )
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias)
        # One row per head, so that queries and keys are normed in one operation.
        self.qk_norm = (
            nn.Parameter(torch.empty(config.num_heads + config.num_kv_heads, config.head_dim))
            if config.qk_norm
            else None
        )

    def forward(
        self, x: torch.Tensor, rotation: Rotation, step: AttentionStep, pages: torch.Tensor
    ) -> torch.Tensor:
        """[N, hidden_size] to the same."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self._head_dim)
        query_key, value = heads.split((self._num_heads + self._num_kv_heads, self._num_kv_heads), dim=1)
        if self.qk_norm is not None:
            query_key = F.rms_norm(query_key, (self._head_dim,), eps=self._eps) * self.qk_norm
        query, key = rotation.apply(query_key).split((self._num_heads, self._num_kv_heads), dim=1)
        store_kv(pages, step.batch.slot_mapping, key, value)
        attended = step.attend(pages, query, self._window)
        return F.linear(attended, self.o_proj.weight, self.o_proj.bias)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202), gate and up projection fused."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] to the same."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down_proj.weight, self.down_proj.bias)


class Layer(nn.Module):
    """Attention and MLP, each on a normed input and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config, layer)
        self.post_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, step: AttentionStep, pages: torch.Tensor
    ) -> torch.Tensor:
        """[N, hidden_size] to the same."""
        x = x + self.attention(self.input_norm(x), rotation, step, pages)
        out: torch.Tensor = x + self.mlp(self.post_norm(x))
        return out


class Decoder(nn.Module):
    """The whole model. Made on the meta device or empty: `load_weights` fills it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self._inv_freq = config.rope.inverse_frequencies(config.head_dim)
        # Handed its weight, or else it would draw random numbers, for which torch imports its compiler here.
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = (
            None if config.tied_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    def forward(self, token_ids: torch.Tensor, step: AttentionStep, pages: KVPages) -> torch.Tensor:
        """int64 [N] ids of a step's tokens to hidden states [N, hidden_size]; writes the tokens' KV."""
        x: torch.Tensor = self.embed(token_ids)
        inv_freq = torch.tensor(self._inv_freq, dtype=torch.float32, device=x.device)
        rotation = Rotation(step.batch.positions, inv_freq, self.config.rope.attention_factor, x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, step, pages.layer(index))
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] to float32 [R, vocab_size]: hand in only the rows that sample."""
        table = self.embed.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(self.norm(hidden), table).float()
