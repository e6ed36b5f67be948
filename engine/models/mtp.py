"""The layer with which a model predicts one token further: multi-token prediction, MTP (DeepSeek 2024,
arXiv:2412.19437, section 2.2).

    token at position i ─▶ embedding ─▶ norm ─┐
                                              ├─ projection ─▶ layer ─▶ norm ─▶ output head ─▶ token at i + 1
    normed hidden state at i - 1 ─▶ norm ─────┘                          │
                                                 normed hidden state at i, from which a draft continues

The embedding table and the output head are the model's.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.attention.base import AttentionStep
from engine.attention.kv_pages import KVPages
from engine.model_config.config import ModelConfig
from engine.models.decoder import Decoder, normed_by
from engine.models.draft_layer import DraftLayer
from engine.models.native_decoder import NativeDecoder


class MTPDecoder(DraftLayer):
    """Implements `DraftLayer`. It has no tables until it shares those of the model."""

    def __init__(self, config: ModelConfig) -> None:
        """`config` is that of `engine.loading.load_mtp.mtp_config`."""
        super().__init__(config)
        hidden, eps = config.hidden_size, config.norms.eps
        self.embedding_norm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.projection = nn.Linear(2 * hidden, hidden, bias=False)
        del self.embed
        self.lm_head = None

    def forward(
        self, token_ids: torch.Tensor, step: AttentionStep, pages: KVPages, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Implement `Decoder.forward`; `received` are the normed hidden states at the positions before."""
        assert received is not None
        embedded = normed_by(self.embedding_norm, self._embedded(token_ids))
        both = torch.cat((embedded, normed_by(self.hidden_norm, received)), -1)
        return super().forward(token_ids, step, pages, self.projection(both))

    def states_of(self, model: Decoder | NativeDecoder, hidden: torch.Tensor) -> torch.Tensor:
        """Implement `DraftLayer.states_of`."""
        return model.normed(hidden).to(self.projection.weight.dtype)

    def continuing(self, hidden: torch.Tensor) -> torch.Tensor:
        """Implement `DraftLayer.continuing`."""
        return self.normed(hidden).to(hidden.dtype)
