"""A layer that drafts for a model from its hidden states: of MTP (`engine/models/mtp.py`), or of EAGLE-3
(`engine/models/eagle3.py`).

    token at position i ─────────────┐
                                     ├─▶ layer ─▶ state at i ─▶ logits of the token at i + 1
    the model's state at i - 1 ──────┘               │
                                                     └─▶ instead of the model's state, as a draft continues
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from engine.models.decoder import Decoder
from engine.models.native_decoder import NativeDecoder


class DraftLayer(Decoder, ABC):
    """A decoder of this one layer. `forward` takes the states at the positions before as `received`, [N,
    hidden_size].
    """

    has_own_embedding = False
    """Whether its embedding table is not the model's."""
    has_own_head = False
    """Whether its output head is not the model's."""

    def share_tables(self, model: Decoder) -> None:
        """Use those tables of the model of which it has none."""
        if not self.has_own_embedding:
            self.embed = model.embed
        if not self.has_own_head:
            self.lm_head, self.head_few_rows = model.lm_head, model.head_few_rows

    @abstractmethod
    def states_of(self, model: Decoder | NativeDecoder, hidden: torch.Tensor) -> torch.Tensor:
        """Map what a step of the model returned, [N, hidden_width], to the states that the layer reads, [N,
        hidden_size], in memory of their own.
        """

    @abstractmethod
    def continuing(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map what `forward` returned, [N, hidden_size], to the states from which a draft continues."""
