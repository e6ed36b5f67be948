"""A mixture of experts in place of a layer's MLP: each token goes through the few experts its router prefers.

    x ─▶ router ─▶ softmax ─▶ top k ─▶ (token, expert) pairs ─▶ sorted by expert ─▶ gate, up ─▶ SiLU * ─▶ down
                                 └──────────── weights ───────────▶ sum of each token's pairs ◀──────────────┘

A token's pairs are summed in the order its router gave them, so what else is in a batch changes no sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.models.experts_config import ExpertsConfig
from engine.models.operations import Operations


class Experts(nn.Module):
    """The router and the experts, or those of them that this rank holds."""

    def __init__(self, config: ExpertsConfig, hidden_size: int) -> None:
        super().__init__()
        self._per_token, self._renormalizes = config.per_token, config.renormalizes
        count, inner = len(config.held), config.intermediate_size
        self._first = config.held.start
        # Not a linear layer, which would be quantized: it is small, and a token's experts depend on it.
        self.router = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(count, hidden_size, inner))

    def forward(self, x: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Map [N, hidden_size] to the same shape."""
        chosen, weights = route(F.linear(x, self.router), self._per_token, self._renormalizes)
        return operations.experts(x, chosen, weights, self.gate_up_proj, self.down_proj, self._first)


def route(logits: torch.Tensor, per_token: int, renormalizes: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Map [N, num_experts] to each token's experts, int64 [N, per_token], and their shares, float32 of that shape.

    Ties between experts are broken as `torch.topk` breaks them. Shares stay float32 where transformers
    rounds Qwen3's to the model's type.
    """
    shares, chosen = torch.topk(logits.softmax(-1, dtype=torch.float32), per_token)
    return chosen, shares / shares.sum(-1, keepdim=True) if renormalizes else shares


def experts_mlp(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first_expert: int,
) -> torch.Tensor:
    """Implement `ExpertsMLP` in torch, expert by expert. Reads the tokens per expert back from the device."""
    num_tokens, per_token = chosen.shape
    outputs = x.new_zeros(num_tokens * per_token, x.shape[1])
    pairs = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=first_expert + len(down)).tolist()
    for expert, mine in enumerate(pairs.split(counts), -first_expert):
        if 0 <= expert < len(down) and len(mine):
            gate, up = F.linear(x[mine // per_token], gate_up[expert]).chunk(2, -1)
            outputs[mine] = F.linear(F.silu(gate) * up, down[expert])
    parts = outputs.view(num_tokens, per_token, -1) * weights[..., None]
    return parts.sum(1).to(x.dtype)
