"""The MLP of layers without experts, and the one that all tokens share next to their experts."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.linear import Rounded, rounds
from engine.layers.operations import Operations
from engine.model_parts.parts import MLPConfig


class MLP(nn.Module):
    """A gated MLP (Shazeer 2020, arXiv:2002.05202), gate and up projection fused."""

    def __init__(self, config: MLPConfig, hidden_size: int) -> None:
        super().__init__()
        inner, bias = config.intermediate_size, config.bias
        self._is_gelu = config.activation == "gelu_tanh"
        self.gate_up_proj = nn.Linear(hidden_size, 2 * inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden_size, bias=bias)

    @property
    def rounds(self) -> int:
        """Numbers of its input that share a scale if the input may be rounded; otherwise 0."""
        return rounds(self.gate_up_proj)

    def forward(self, x: torch.Tensor | Rounded, operations: Operations) -> torch.Tensor:
        """Map [N, hidden_size] to the same shape."""
        gate_up = self.gate_up_proj(x)
        inner: torch.Tensor | Rounded
        if inputs := rounds(self.down_proj):
            inner = operations.gated_fp8(gate_up, inputs, is_gelu=self._is_gelu)
        else:
            inner = operations.gelu_mul(gate_up) if self._is_gelu else operations.silu_mul(gate_up)
        output: torch.Tensor = self.down_proj(inner)
        return output
