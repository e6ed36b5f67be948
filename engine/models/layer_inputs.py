"""A second embedding of each token, with a part for each layer (Gemma 4's per-layer embeddings).

    token ─▶ table ─────────────────────┐
    x ─▶ projection ─▶ norm ─▶ parts ─ + ─▶ part of layer i ─┐
                                         stream ─▶ gate ─ GELU * ─▶ projection ─▶ norm ─▶ added to the stream

Every rank has all of it, because it is read by rows. Its matrices are small compared with a layer's others, and
are no linear layers, which would be quantized.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.operations import Operations
from engine.model_parts.parts import LayerInputsConfig


class LayerInputs(nn.Module):
    """Computes the inputs of a step's tokens for all layers."""

    def __init__(self, config: LayerInputsConfig, hidden_size: int, num_layers: int, eps: float) -> None:
        super().__init__()
        self._size, self._num_layers, self._hidden_size, self._eps = config.size, num_layers, hidden_size, eps
        self.table = nn.Parameter(torch.empty(config.vocab_size, num_layers * config.size))
        self.projection = nn.Parameter(torch.empty(num_layers * config.size, hidden_size))
        self.norm = nn.Parameter(torch.empty(config.size))

    def forward(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Map int64 [N] tokens and their embeddings [N, hidden_size] to [N, num_layers, size]."""
        shape = len(token_ids), self._num_layers, self._size
        projected = (F.linear(x, self.projection) * self._hidden_size**-0.5).view(shape)
        normed = F.rms_norm(projected, self.norm.shape, self.norm, self._eps)
        own = F.embedding(token_ids, self.table).view(shape) * self._size**0.5
        both: torch.Tensor = (normed + own) * 2.0**-0.5
        return both


class InputBranch(nn.Module):
    """The branch of a layer that adds its part to the residual stream."""

    def __init__(self, config: LayerInputsConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(config.size, hidden_size))
        self.projection = nn.Parameter(torch.empty(hidden_size, config.size))
        self.norm = nn.RMSNorm(hidden_size, eps=eps)
        self._eps = eps

    def forward(self, x: torch.Tensor, own: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Map the stream [N, hidden_size] and the layer's part [N, size] to the branch's output, added later."""
        gated = operations.gelu_mul(torch.cat((F.linear(x, self.gate), own), -1))
        return operations.add_norm(F.linear(gated, self.projection), None, self.norm.weight, self._eps)[1]
