"""Experts next to a layer's MLP (Gemma 4): both read the stream through separate norms; their outputs are normed
and summed.

normed stream ──────────────▶ MLP ─────────────────────────────▶ norm ─┐
stream ─┬─ norm ────────────▶ experts, gates by GELU ──────────▶ norm ─ + ─▶
        └─ norm, scaled ─▶ router ─▶ softmax ─▶ top k, scaled ─┘
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.linear import rounds
from engine.layers.operations import Operations
from engine.model_parts.experts_config import ExpertsConfig
from engine.model_parts.parts import MLPConfig
from engine.models.mlp import MLP
from engine.parallel.collective import Collective


class ExpertsAndMLP(nn.Module):
    """A layer's MLP, its router and its experts (or those of this rank)."""

    def __init__(
        self, mlp: MLPConfig, config: ExpertsConfig, hidden_size: int, eps: float, ranks: Collective
    ) -> None:
        super().__init__()
        self._config, self._eps, self._ranks = config, eps, ranks
        count, inner = len(config.held), config.intermediate_size
        self.mlp = MLP(mlp, hidden_size)
        self.router = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.router_scale = nn.Parameter(torch.empty(hidden_size))
        self.expert_scale = nn.Parameter(torch.empty(config.num_experts))
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(count, hidden_size, inner))
        self.mlp_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.input_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.output_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.on_chosen: Callable[[torch.Tensor], None] | None = None
        """Called with each token's experts, int64 [N, k]."""

    @property
    def rounds(self) -> int:
        """Numbers of the MLP's input that share a scale if the input may be rounded; otherwise 0."""
        return rounds(self.mlp.gate_up_proj)

    def forward(self, x: torch.Tensor, normed: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Map the stream and the MLP's normed input, [N, hidden_size] each, to the same shape, summed over all
        ranks.
        """
        dense = operations.add_norm(
            self._ranks.sum(self.mlp(normed, operations)), None, self.mlp_norm.weight, self._eps
        )[1]
        chosen, weights = self._route(x, operations)
        if self.on_chosen is not None:
            self.on_chosen(chosen)
        read = operations.add_norm(x, None, self.input_norm.weight, self._eps)[1]
        matrices = self.gate_up_proj, self.down_proj
        routed = operations.experts(read, chosen, weights, *matrices, self._config.held.start, is_gelu=True)
        return dense + operations.add_norm(self._ranks.sum(routed), None, self.output_norm.weight, self._eps)[1]

    def _route(self, x: torch.Tensor, operations: Operations) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's experts, int64 [N, per_token], and their weights, float32 of that shape."""
        scaled = F.rms_norm(x, x.shape[-1:], eps=self._eps) * self.router_scale * x.shape[-1] ** -0.5
        chosen, weights = operations.route(F.linear(scaled, self.router), self._config.per_token, True)
        return chosen, weights * self.expert_scale[chosen]
