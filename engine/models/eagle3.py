"""The layer of EAGLE-3 (Li et al. 2025, arXiv:2503.01840), which is trained for a model.

    token at position i ─▶ embedding ─▶ norm ─────┐
                                                  ├─▶ attention ─ + ─▶ MLP ─┬─▶ norm ─▶ head ─▶ token at i + 1
    inner states at i - 1 ─▶ reduction ─┬─▶ norm ─┘               │         │
                                        └─────────────────────────┘         └─▶ state at i

Its head may have only the likeliest tokens of the model: the others are never drafted.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from engine.attention.base import AttentionStep
from engine.attention.state_slots import LayerState
from engine.layers.operations import Operations
from engine.model_config.config import ModelConfig
from engine.model_config.eagle3 import Eagle3Config
from engine.models.decoder import Attention, Decoder, Layer, normed_by
from engine.models.draft_layer import DraftLayer
from engine.models.native_decoder import NativeDecoder
from engine.parallel.collective import ALONE


class Eagle3Decoder(DraftLayer):
    """Implements `DraftLayer`."""

    has_own_head = True

    def __init__(self, config: Eagle3Config, *, has_own_embedding: bool) -> None:
        """`has_own_embedding`: whether the files have an embedding table; else it shares that of the model."""
        layer = config.layer
        super().__init__(layer)
        self.has_own_embedding = has_own_embedding
        del self.embed
        if has_own_embedding:
            table = torch.empty(config.vocab_size, layer.hidden_size)
            self.embed = nn.Embedding(config.vocab_size, layer.hidden_size, _weight=table)
        width = config.num_states * config.model_hidden_size
        self.states_norm = nn.RMSNorm(width, eps=layer.norms.eps) if config.norms_states else None
        own = config.model_hidden_size
        norms = [nn.RMSNorm(own, eps=layer.norms.eps) for _ in range(config.num_states * config.norms_each)]
        self.state_norms = nn.ModuleList(norms)
        self.reduction = nn.Linear(width, layer.hidden_size, bias=False)
        self.layers = nn.ModuleList([_Layer(layer, norms_residual=config.norms_residual)])
        self.inputs = _Embedded()
        self._vocab_size, self._norms_output = config.vocab_size, config.norms_output
        self.drafted: torch.Tensor | None = None
        """The model's ids of the tokens that the head has, int64 [layer.vocab_size]; None for all."""

    def states_of(self, model: Decoder | NativeDecoder, hidden: torch.Tensor) -> torch.Tensor:
        """Implement `DraftLayer.states_of`."""
        inner = hidden[:, model.config.hidden_size :]
        if model.config.scales.residual != 1:
            inner = inner * model.config.scales.residual
        inner = inner.to(self.reduction.weight.dtype)
        if self.states_norm is not None:
            inner = normed_by(self.states_norm, inner)
        if self.state_norms:
            norms, parts = cast("list[nn.RMSNorm]", self.state_norms), inner.split(model.config.hidden_size, -1)
            inner = torch.cat([normed_by(norm, part) for norm, part in zip(norms, parts, strict=True)], -1)
        reduced: torch.Tensor = self.reduction(inner)
        return reduced

    def continuing(self, hidden: torch.Tensor) -> torch.Tensor:
        """Implement `DraftLayer.continuing`."""
        return self._norm(hidden) if self._norms_output else hidden

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Implement `Decoder.logits`, for all tokens of the model; those that the head lacks are impossible."""
        if self.drafted is None:
            return super().logits(hidden, out)
        if out is None:
            out = torch.empty(len(hidden), self._vocab_size, dtype=torch.float32, device=hidden.device)
        return out.fill_(-torch.inf).index_copy_(1, self.drafted, super().logits(hidden))


class _Embedded(nn.Module):
    """Passes tokens' embeddings to the layer, as `LayerInputs` does with other inputs."""

    def forward(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Map [N] tokens and their embeddings [N, hidden_size] to [N, 1 layer, hidden_size]."""
        return x[:, None]


class _Layer(Layer):
    """A layer whose attention also reads the embeddings."""

    def __init__(self, config: ModelConfig, *, norms_residual: bool) -> None:
        super().__init__(config, 0, ALONE)
        assert isinstance(self.attention, Attention)
        shape = config.attention_in(0)
        self.attention.qkv_proj = nn.Linear(2 * config.hidden_size, shape.qkv_outputs, bias=shape.qkv_bias)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.norms.eps)
        self._norms_residual = norms_residual

    def forward(
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None,
        operations: Operations,
        step: AttentionStep,
        pages: torch.Tensor | LayerState,
        own: torch.Tensor | None = None,
        inner: list[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Implement `Layer.forward`; `x` are the states at the positions before, and `own` the embeddings."""
        assert own is not None and self.input_norm is not None
        normed = normed_by(self.hidden_norm, x)
        # Later operations may add to x in place, and states are read again.
        x = normed if self._norms_residual else x.clone()
        both = torch.cat((normed_by(self.input_norm, own), normed), -1)
        branch = self.attention(both, operations, step, pages)
        x, normed_x = self._add(x, branch, self.post_norm, operations, rounds=0)
        return x, self.mlp(normed_x, operations)
