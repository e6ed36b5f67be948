"""A mixture of experts instead of a layer's MLP: each token goes through the few experts that its router prefers.

    x ─▶ router ─▶ softmax ─▶ top k ─▶ (token, expert) pairs ─▶ sorted by expert ─▶ gate, up ─▶ SiLU * ─▶ down
                                 └──────────── weights ───────────▶ sum of each token's pairs ◀──────────────┘

A token's pairs are summed in the order of its router, so a sum does not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.matrix_stack import MatrixStack
from engine.layers.operations import Matrices, Operations
from engine.model_parts.experts_config import Clamp, ExpertsConfig
from engine.model_parts.parts import MLPConfig
from engine.models.mlp import MLP


class Experts(nn.Module):
    """The router, the experts (or those of this rank), and the shared experts."""

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    """The experts' weights, stacked; absent if they are quantized."""

    def __init__(self, config: ExpertsConfig, hidden_size: int) -> None:
        super().__init__()
        self._config = config
        count, inner = len(config.held), config.intermediate_size
        self._first = config.held.start
        # Not a linear layer, which would be quantized: it is small, and a token's experts depend on it.
        self.router = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.router_bias = nn.Parameter(torch.empty(config.num_experts)) if config.router_bias else None
        self.correction = nn.Parameter(torch.empty(config.num_experts)) if config.has_correction else None
        self.apart: nn.ModuleList | None = None
        """Each quantized expert separately, as it is loaded."""
        self._stacks: tuple[MatrixStack, MatrixStack] | None = None
        if config.are_quantized:
            self.apart = nn.ModuleList(MLP(MLPConfig(inner), hidden_size) for _ in config.held)
        else:
            self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden_size))
            self.down_proj = nn.Parameter(torch.empty(count, hidden_size, inner))
        is_biased = config.clamp is not None
        self.gate_up_bias = nn.Parameter(torch.empty(count, 2 * inner)) if is_biased else None
        self.down_bias = nn.Parameter(torch.empty(count, hidden_size)) if is_biased else None
        self.shared = MLP(MLPConfig(config.shared_size), hidden_size) if config.shared_size else None
        self.shared_gate = nn.Parameter(torch.empty(1, hidden_size)) if config.shared_is_gated else None
        self.on_chosen: Callable[[torch.Tensor], None] | None = None
        """Called with each token's experts, int64 [N, k]."""
        self.slots: torch.Tensor | None = None
        """With copies of experts (`engine.models.expert_copies`), int64 [num_experts, turns]: the place of an
        expert's weights on this rank for the tokens of each turn."""

    @property
    def rounds(self) -> int:
        """0: its input may not be rounded, because the router reads it too."""
        return 0

    @property
    def matrices_apart(self) -> tuple[list[Any], ...]:
        """The first and the second matrices of quantized experts, as layers; nothing if experts are plain."""
        if self.apart is None:
            return ()
        return [each.gate_up_proj for each in self.apart], [each.down_proj for each in self.apart]

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the quantized experts' weights, uninitialized. `dtype`: that of plain weights."""
        gate_up, down = self.matrices_apart
        self._stacks = MatrixStack(gate_up, dtype, device), MatrixStack(down, dtype, device)

    @property
    def num_experts(self) -> int:
        """Number of experts on all ranks."""
        return self._config.num_experts

    @property
    def stacked_weights(self) -> list[torch.Tensor]:
        """All weights of the experts on this rank, [slots, ...] each."""
        if self._stacks is not None:
            return [weights for stack in self._stacks for weights in stack.tensors.values()]
        weights = self.gate_up_proj, self.down_proj, self.gate_up_bias, self.down_bias
        return [one for one in weights if one is not None]

    def add_slots(self, count: int) -> None:
        """Make room for the weights of `count` more experts. They are used through `slots` only."""
        self._first = 0
        if self._stacks is not None and self.apart is not None:
            first, before = self.apart[0], self.stacked_weights
            weights = {id(one): one for one in (*first.buffers(), *first.parameters())}
            self.apart.extend([deepcopy(first, dict(weights)) for _ in range(count)])  # without their memory
            self.allocate(self.router.dtype, self.router.device)
            for grown, own in zip(self.stacked_weights, before, strict=True):
                grown[: len(own)] = own
            return
        for name in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias"):
            if (own := getattr(self, name)) is not None:
                grown = torch.cat((own.detach(), own.new_zeros(count, *own.shape[1:])))
                setattr(self, name, nn.Parameter(grown, requires_grad=False))

    def forward(self, x: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Map [N, hidden_size] to the same shape."""
        config = self._config
        if config.is_sigmoid:  # in float32, because small differences of scores decide
            logits = F.linear(x.float(), self.router.float())
            chosen, weights = route_by_sigmoid(logits, config, self.correction)
        else:
            logits = F.linear(x, self.router, self.router_bias)
            chosen, weights = operations.route(logits, config.per_token, config.renormalizes)
        if self.on_chosen is not None:
            self.on_chosen(chosen)
        if self.slots is not None:
            turns = torch.arange(len(chosen), device=chosen.device) % self.slots.shape[1]
            chosen = self.slots[chosen, turns[:, None]]
        if config.scales_inputs:
            inputs = (x[:, None] * weights[..., None]).to(x.dtype).flatten(0, 1)
            pairs = self._routed(inputs, chosen.view(-1, 1), torch.ones_like(weights).view(-1, 1), operations)
            output = pairs.view(*chosen.shape, -1).sum(1)
        else:
            output = self._routed(x, chosen, weights, operations)
        if self.shared is None:
            return output
        shared: torch.Tensor = self.shared(x, operations)
        if self.shared_gate is not None:
            shared = F.linear(x, self.shared_gate).sigmoid() * shared
        return output + shared

    def _routed(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, operations: Operations
    ) -> torch.Tensor:
        """Return each token's weighted sum of its experts' outputs."""
        biases = None
        if self.gate_up_bias is not None and self.down_bias is not None:
            biases = self.gate_up_bias, self.down_bias
        matrices: tuple[Matrices, Matrices] = self._stacks or (self.gate_up_proj, self.down_proj)
        return operations.experts(x, chosen, weights, *matrices, self._first, biases, self._config.clamp)


def route(logits: torch.Tensor, per_token: int, renormalizes: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `engine.layers.operations.Route` in torch.

    Ties between experts are broken as `torch.topk` breaks them. Shares stay float32, while transformers rounds
    Qwen3's to the model's type.
    """
    shares, chosen = torch.topk(logits.softmax(-1, dtype=torch.float32), per_token)
    return chosen, shares / shares.sum(-1, keepdim=True) if renormalizes else shares


def route_by_sigmoid(
    logits: torch.Tensor, config: ExpertsConfig, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map float32 [N, num_experts] as `route` does, by sigmoids (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    correction: float32 [num_experts], added to scores to choose by
    """
    scores = logits.sigmoid()
    wanted = scores if correction is None else scores + correction
    if config.num_groups > 1:
        groups = wanted.unflatten(-1, (config.num_groups, -1))
        best = groups.topk(2, -1).values.sum(-1).topk(config.groups_per_token, -1).indices
        is_open = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        wanted = groups.masked_fill(~is_open[..., None], -torch.inf).flatten(-2)
    chosen = wanted.topk(config.per_token, -1).indices
    weights = scores.gather(-1, chosen)
    if config.renormalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * config.scaling


def experts_mlp(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Matrices,
    down: Matrices,
    first_expert: int,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    clamp: Clamp | None = None,
    *,
    is_gelu: bool = False,
) -> torch.Tensor:
    """Implement `ExpertsMLP` in torch, expert by expert. Reads the tokens per expert back from the device."""

    def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
        first, second = (None, None) if biases is None else (biases[0][expert], biases[1][expert])
        gate, up = _multiplied(rows, gate_up, expert, first).chunk(2, -1)
        if clamp is not None:
            inner = _clamped(gate, up, clamp)
        else:
            inner = (F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)) * up
        return _multiplied(inner, down, expert, second)

    return _each_expert(x, chosen, weights, first_expert, len(down), compute)


def _multiplied(rows: torch.Tensor, matrices: Matrices, expert: int, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(matrices, torch.Tensor):
        return F.linear(rows, matrices[expert], bias)
    product: torch.Tensor = matrices.layers[expert](rows)
    return product if bias is None else product + bias


def _each_expert(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    first_expert: int,
    num_experts: int,
    compute: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return each token's weighted sum of the results of `compute` for an expert and its tokens' rows, for the
    `num_experts` experts from `first_expert` on. Reads the tokens per expert back from the device.
    """
    num_tokens, per_token = chosen.shape
    outputs = x.new_zeros(num_tokens * per_token, x.shape[1])
    pairs = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=first_expert + num_experts).tolist()
    for expert, mine in enumerate(pairs.split(counts), -first_expert):
        if 0 <= expert < num_experts and len(mine):
            outputs[mine] = compute(expert, x[mine // per_token])
    parts = outputs.view(num_tokens, per_token, -1) * weights[..., None]
    return parts.sum(1).to(x.dtype)


def _clamped(gate: torch.Tensor, up: torch.Tensor, clamp: Clamp) -> torch.Tensor:
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * gate * torch.sigmoid(gate * clamp.alpha)
