"""The encoder: XLM-R and ModernBERT, whose parts `EncoderConfig` selects.

    XLM-R        tokens + positions ─ norm ─▶ x ─┬─ attention ─ + ─ norm ─┬─ MLP ─ + ─ norm ─▶ ... ─▶
                                                 └───────────────┘        └────────┘
    ModernBERT   tokens ─ norm ─▶ x ─┬─ norm ─ turned attention ─ + ─┬─ norm ─ gated MLP ─ + ─▶ ... ─ norm ─▶
                                     └───────────────────────────────┘ └───────────────────┘

All tensors are ragged: dim 0 is the N tokens of a step, of all its prompts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.operations import Rotary
from engine.model_config.encoder import EncoderConfig
from engine.models.encoders.batch import EncoderBatch


class EncoderAttention(nn.Module):
    """Attention of every token to all others of its prompt, with one matrix for queries, keys and values."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        hidden, self._head_dim = config.hidden_size, config.head_dim
        self._reach = config.layers[layer].reach
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=config.has_biases)
        self.output = nn.Linear(hidden, hidden, bias=config.has_biases)

    def forward(
        self, x: torch.Tensor, batch: EncoderBatch, rotation: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Map [N, hidden_size] to the same shape. `rotation`: cosines and sines, [N, 1, 1, head_dim / 2] each."""
        qkv = self.qkv(x).view(len(x), 3, -1, self._head_dim)
        if rotation is not None:
            turned, value = qkv.tensor_split((2,), dim=1)
            first, second = turned.float().chunk(2, -1)
            cos, sin = rotation
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
            qkv = torch.cat((turned.to(value.dtype), value), 1)
        output: torch.Tensor = self.output(batch.attend(qkv, self._reach))
        return output


class EncoderMLP(nn.Module):
    """A plain MLP, or one with gates (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self._is_gated, self._approximate = config.is_modern, _approximation(config)
        self.inner = nn.Linear(hidden, (1 + config.is_modern) * inner, bias=bias)
        self.output = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, hidden_size] to the same shape."""
        inner = self.inner(x)
        if self._is_gated:
            gate, up = inner.chunk(2, -1)
            inner = F.gelu(gate, approximate=self._approximate) * up
        else:
            inner = F.gelu(inner, approximate=self._approximate)
        output: torch.Tensor = self.output(inner)
        return output


class EncoderBlock(nn.Module):
    """Attention and MLP, whose inputs or sums are normed."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self._norms_inputs = config.is_modern
        self.attention = EncoderAttention(config, layer)
        self.mlp = EncoderMLP(config)
        has_norm = layer > 0 or not config.is_modern  # ModernBERT already has a norm after the embeddings.
        self.attention_norm = _norm(config) if has_norm else None
        self.mlp_norm = _norm(config)

    def forward(
        self, x: torch.Tensor, batch: EncoderBatch, rotation: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Map [N, hidden_size] to the same shape."""
        if self._norms_inputs:
            normed = x if self.attention_norm is None else self.attention_norm(x)
            x = x + self.attention(normed, batch, rotation)
            output: torch.Tensor = x + self.mlp(self.mlp_norm(x))
            return output
        assert self.attention_norm is not None
        x = self.attention_norm(x + self.attention(x, batch, rotation))
        output = self.mlp_norm(x + self.mlp(x))
        return output


class ScoreHead(nn.Module):
    """The classification head: a prompt's pooled state becomes one number."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dense = nn.Linear(hidden, hidden, bias=config.head_bias)
        self.norm = _norm(config) if config.is_modern else None
        self.score = nn.Linear(hidden, 1)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """Map [prompts, hidden_size] to logits [prompts, 1]."""
        inner = self.dense(pooled)
        inner = F.tanh(inner) if self.norm is None else self.norm(F.gelu(inner))
        logits: torch.Tensor = self.score(inner)
        return logits


class EncoderModel(nn.Module):
    """The whole model. It is created on the meta device; `load_encoder` fills it."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.tokens = nn.Parameter(torch.empty(config.vocab_size, hidden))
        is_old = not config.is_modern
        self.places = nn.Parameter(torch.empty(config.num_positions, hidden)) if is_old else None
        self.types = nn.Parameter(torch.empty(config.num_token_types, hidden)) if is_old else None
        self.embedded_norm = _norm(config)
        self.layers = nn.ModuleList(EncoderBlock(config, layer) for layer in range(config.num_layers))
        self.last_norm = _norm(config) if config.is_modern else None
        self.head = ScoreHead(config) if config.has_head else None

    def forward(self, batch: EncoderBatch) -> torch.Tensor:
        """Return the values of each prompt, float32: [prompts, hidden_size], or its score, [prompts, 1], if the
        model has a classification head: the sigmoid of the head's output.
        """
        x = F.embedding(batch.token_ids, self.tokens)
        if self.places is not None and self.types is not None:
            x = x + self.types[0] + F.embedding(self._places_of(batch), self.places)
        x = self.embedded_norm(x)
        rotations = self._rotations(batch)
        for layer, kind in zip(self.layers, self.config.layers, strict=True):
            x = layer(x, batch, None if kind.rope is None else rotations[kind])
        if self.last_norm is not None:
            x = self.last_norm(x)
        pooled = x[batch.firsts].float() if self.config.pooling == "cls" else batch.mean(x)
        if self.head is None:
            return pooled
        logits: torch.Tensor = self.head(pooled.to(x.dtype))
        return logits.float().sigmoid()

    def _places_of(self, batch: EncoderBatch) -> torch.Tensor:
        """Return the row of each token in the table of positions. Padding tokens have their own row, and do not
        count.
        """
        pad = self.config.pad_token_id
        counts = batch.token_ids != pad
        so_far = counts.cumsum(0)
        before = (so_far - counts.long())[batch.firsts]
        return (so_far - before[batch.owners]) * counts + pad

    def _rotations(self, batch: EncoderBatch) -> dict[object, tuple[torch.Tensor, torch.Tensor]]:
        """Return the cosines and sines for each kind of layer that rotates."""
        kinds = [kind for kind in dict.fromkeys(self.config.layers) if kind.rope is not None]
        if not kinds:
            return {}
        device = batch.positions.device
        rotary = Rotary.of([kind.rope for kind in kinds], self.config.head_dim, torch.float32, device)
        angles = batch.positions[:, None, None, None].float() * rotary.inv_freq[:, None, None, None]
        factor = rotary.factor[:, None, None, None]
        cos, sin = (angles.cos() * factor).unbind(0), (angles.sin() * factor).unbind(0)
        return dict(zip(kinds, zip(cos, sin, strict=True), strict=True))


def _norm(config: EncoderConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


def _approximation(config: EncoderConfig) -> str:
    return "tanh" if config.activation == "gelu_tanh" else "none"
