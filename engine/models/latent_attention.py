"""Multi-head latent attention, MLA, with absorbed projections (DeepSeek-V2, arXiv:2405.04434, section 2.1).

The paper expands each token's latent to every head's key and value. Pages hold the latent instead, because
products may be reordered: a head's query times the expanded key is the query times the head's half of the
expansion, times the latent. The result is attention in which all heads share one key, and its latent is the value:

    x ─┬─ (compress, norm) ─ expand ─ queries ─┬─ plain ─ x expansion to keys ─┐
       │                                       └─ turned ──────────────────────┴─▶ query [heads, rank + rope]
       └─ compress ─┬─ latent ─ norm ─┐                                                ▼
                    └─ turned ────────┴─▶ key [1, rank + rope] ─▶ pages ─────────▶ attention
                                                                                       │
                                                          output ◀─ x expansion to values

On GPUs, rows of many tokens expand keys and values instead (`engine/attention/expanded.py`).
"""

from __future__ import annotations

import torch
from torch import nn

from engine.attention.base import AttentionStep
from engine.attention.expanded import ExpandedStep, HeadsQuery
from engine.attention.kv_pages import UNSCALED, store_kv
from engine.layers.linear import Rounded, rounds
from engine.layers.operations import Operations
from engine.model_config.config import ModelConfig
from engine.model_parts.parts import LatentAttentionConfig
from engine.parallel.context_attention import step_written

_EPS = 1e-6
"""Epsilon of the norms of compressed queries and keys, independent of the model's other norms."""


class LatentAttention(nn.Module):
    """One layer's attention. Every rank computes the whole latent, and its own heads."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        shape, kind = config.attention, config.layers[layer]
        assert isinstance(shape, LatentAttentionConfig)
        self._shape, self._window, self._rope = shape, kind.window, config.ropes.index(kind.rope)
        self.kv_scales = UNSCALED
        """Scales of float8 pages, set when the model is loaded for them."""
        self.qkv_a_proj = nn.Linear(config.hidden_size, shape.qkv_outputs, bias=shape.qkv_bias)
        self.q_norm = self.q_b_proj = None
        if shape.query_rank is not None:
            self.q_norm = nn.Parameter(torch.empty(shape.query_rank))
            self.q_b_proj = nn.Linear(shape.query_rank, shape.query_outputs, bias=False)
        self.latent_norm = nn.Parameter(torch.empty(shape.rank))
        # Not a linear layer, which would be quantized: it is multiplied from both sides.
        self.expansion = nn.Parameter(torch.empty(shape.num_heads, shape.plain_dim + shape.value_dim, shape.rank))
        self.o_proj = nn.Linear(shape.num_heads * shape.value_dim, config.hidden_size, bias=shape.output_bias)

    @property
    def rounds(self) -> int:
        """Numbers of its input that share a scale if the input may be rounded; otherwise 0."""
        return rounds(self.qkv_a_proj)

    def forward(
        self, x: torch.Tensor | Rounded, operations: Operations, step: AttentionStep, pages: torch.Tensor
    ) -> torch.Tensor:
        """Map [N, hidden_size] to the same shape."""
        shape = self._shape
        queries, key = self.qkv_a_proj(x).tensor_split((-shape.head_dim,), dim=1)
        written = step_written(step, pages)
        store_kv(written, step.batch.slot_mapping, self._key(key, operations), None, self.kv_scales)
        to_keys, to_values = self.expansion.tensor_split((shape.plain_dim,), dim=1)
        query = self._query(queries, operations)

        def absorbed(step: AttentionStep, query: HeadsQuery) -> torch.Tensor:
            latent = (query.plain.transpose(0, 1) @ to_keys).transpose(0, 1)
            attended = step.attend(pages, torch.cat((latent, query.turned), -1), self._window, self.kv_scales)
            # Per head: [heads, N, rank] times [heads, rank, value_dim].
            values = attended.view(len(attended), -1, shape.rank).transpose(0, 1) @ to_values.transpose(1, 2)
            return values.transpose(0, 1)

        if isinstance(step, ExpandedStep):
            values = step.values(pages, query, self.expansion, self.kv_scales, absorbed)
        else:
            values = absorbed(step, query)
        output: torch.Tensor = self.o_proj(values.flatten(1))
        return output

    def _key(self, key: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Return the numbers that pages hold, [N, 1, rank + rope_dim]."""
        latent, turned = key.tensor_split((self._shape.rank,), dim=1)
        normed = operations.add_norm(latent.contiguous(), None, self.latent_norm, _EPS)[1]
        return torch.cat((normed[:, None], operations.rotate(turned[:, None], self._rope)), -1)

    def _query(self, queries: torch.Tensor, operations: Operations) -> HeadsQuery:
        """Return the queries of all heads, rotated."""
        if self.q_b_proj is not None and self.q_norm is not None:
            queries = self.q_b_proj(operations.add_norm(queries.contiguous(), None, self.q_norm, _EPS)[1])
        heads = queries.reshape(len(queries), self._shape.num_heads, -1)
        plain, turned = heads.tensor_split((self._shape.plain_dim,), dim=2)
        return HeadsQuery(plain, operations.rotate(turned, self._rope))
