"""Descriptions of the parts that the one decoder is composed of. A model family is a choice among them.

    ModelConfig ─┬─ attention   heads, scale, biases, norms of queries and keys     one for all layers
                 ├─ layers      window and rotation                                 one of each layer
                 ├─ mlp         inner size, activation, biases                      of the dense layers
                 ├─ experts     router, number and size of experts                  of the sparse layers
                 ├─ norms       where a layer norms, and how
                 └─ scales      constant factors of embeddings, residuals, logits

Nothing here imports torch. Every default is what Llama does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.models.experts_config import ExpertsConfig
from engine.models.rope import RopeConfig

QKNorm = Literal["none", "heads", "full"]
"""RMS norms of queries and keys before rotation: none; each head by itself; all heads of a token together."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Attention whose query heads share keys and values (Ainslie et al. 2023, arXiv:2305.13245)."""

    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key and value heads; equal to `num_heads` (MHA), a divisor (GQA) or 1 (MQA)."""
    head_dim: int
    scale: float
    """Factor of the scores before the softmax."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm = "none"

    @property
    def kv_numbers(self) -> int:
        """Numbers that one layer keeps for each token."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def qkv_outputs(self) -> int:
        """Outputs of the fused projection to queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def num_parameters(self, hidden_size: int) -> int:
        """Return the number of weights of one layer."""
        query, qkv = self.num_heads * self.head_dim, self.qkv_outputs
        normed = {"none": 0, "heads": 2 * self.head_dim, "full": query + self.num_kv_heads * self.head_dim}
        biases = qkv * self.qkv_bias + hidden_size * self.output_bias
        return (qkv + query) * hidden_size + biases + normed[self.qk_norm]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What may differ from one layer's attention to the next one's."""

    rope: RopeConfig | None
    """How positions turn queries and keys; None where they do not (NoPE)."""
    window: int | None = None
    """How many last positions a query attends to, its own included; None for all."""


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """A gated MLP (Shazeer 2020, arXiv:2002.05202)."""

    intermediate_size: int
    bias: bool = False

    def num_parameters(self, hidden_size: int) -> int:
        """Return the number of weights of one layer."""
        inner = self.intermediate_size
        return 3 * hidden_size * inner + (2 * inner + hidden_size) * self.bias


@dataclass(frozen=True, slots=True)
class NormConfig:
    """RMS norms (Zhang and Sennrich 2019, arXiv:1910.07467) of the residual stream."""

    eps: float


@dataclass(frozen=True, slots=True)
class ModelParts:
    """All parts of a model, as a family reads them from its config.json."""

    attention: AttentionConfig
    layers: tuple[LayerKind, ...]
    mlp: MLPConfig
    norms: NormConfig
    experts: ExpertsConfig | None = None
