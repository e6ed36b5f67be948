"""One decoder for all supported model families; `ModelConfig` selects the variation of each part.

    embed ─▶ x ─┬─ norm ─ qkv ─ (q/k norm) ─ rotate ─ attention ─ output ─ + ─┬─ norm ─ MLP ─ + ─▶ next layer
                └──────────────────────────────────────────────────────────┘  └───────────────┘

All tensors are ragged: dim 0 is the N tokens of a step, whatever request they belong to. A sum and the norm that
follows it are one operation, so a layer returns x and its MLP's output, not yet added.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.base import AttentionStep
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVPages
from engine.models.config import ModelConfig
from engine.models.experts import Experts
from engine.models.operations import Operations, Rotary
from engine.models.select_operations import operations_for
from engine.parallel.collective import ALONE, Collective
from engine.parallel.vocabulary import embed


class Attention(nn.Module):
    """Attention with fused projections: one matrix for queries, keys and values."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        shape, kind = config.attention, config.layers[layer]
        self._head_dim, self._eps = shape.head_dim, config.norms.eps
        self._window, self._rope = kind.window, config.ropes.index(kind.rope)
        self.kv_scales = UNSCALED
        """Scales of float8 pages, set when the model is loaded for them."""
        self.qkv_proj = nn.Linear(config.hidden_size, shape.qkv_outputs, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, config.hidden_size, bias=shape.output_bias)
        # One row per head, so that queries and keys are normed in one operation.
        self.qk_norm = (
            nn.Parameter(torch.empty(shape.num_heads + shape.num_kv_heads, shape.head_dim))
            if shape.qk_norm == "heads"
            else None
        )

    def forward(
        self, x: torch.Tensor, operations: Operations, step: AttentionStep, pages: torch.Tensor
    ) -> torch.Tensor:
        """Map [N, hidden_size] to the same shape."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self._head_dim)
        query = operations.rotate_into(pages, heads, self._rope, self.qk_norm, self._eps, self.kv_scales)
        attended = step.attend(pages, query, self._window, self.kv_scales)
        output: torch.Tensor = self.o_proj(attended)
        return output


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202), gate and up projection fused."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner, bias = config.mlp.intermediate_size, config.mlp.bias
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * inner, bias=bias)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Map [N, hidden_size] to the same shape."""
        output: torch.Tensor = self.down_proj(operations.silu_mul(self.gate_up_proj(x)))
        return output


class Layer(nn.Module):
    """Attention and MLP, each on a normed input, summed over all ranks and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, ranks: Collective) -> None:
        super().__init__()
        self._ranks = ranks
        self._eps = config.norms.eps
        self.input_norm = nn.RMSNorm(config.hidden_size, eps=config.norms.eps)
        self.attention = Attention(config, layer)
        self.post_norm = nn.RMSNorm(config.hidden_size, eps=config.norms.eps)
        experts = config.experts_in(layer)
        self.mlp = MLP(config) if experts is None else Experts(experts, config.hidden_size)

    def forward(
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None,
        operations: Operations,
        step: AttentionStep,
        pages: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map the residual stream and the branch to add, [N, hidden_size] each, to those after this layer."""
        x, normed = operations.add_norm(x, branch, self.input_norm.weight, self._eps)
        branch = self._ranks.sum(self.attention(normed, operations, step, pages))
        x, normed = operations.add_norm(x, branch, self.post_norm.weight, self._eps)
        return x, self._ranks.sum(self.mlp(normed, operations))


class Decoder(nn.Module):
    """The whole model. It is created on the meta device or empty; `load_weights` fills it."""

    def __init__(self, config: ModelConfig, ranks: Collective = ALONE) -> None:
        """`config` is the shape of this rank's layers (`Shard.of`)."""
        super().__init__()
        self.config = config
        self._ranks = ranks
        self.operations: Callable[[AttentionBatch], Operations] | None = None
        """Makes a step's operations; selected for the device at the first step."""
        # Pass the weight: otherwise nn.Embedding draws random numbers, for which torch imports its compiler.
        rows = ranks.shard.num_rows(config.vocab_size)
        table = torch.empty(rows, config.hidden_size)
        self.embed = nn.Embedding(rows, config.hidden_size, _weight=table)
        self.layers = nn.ModuleList(Layer(config, index, ranks) for index in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norms.eps)
        self.lm_head = None if config.tied_embeddings else nn.Linear(config.hidden_size, rows, bias=False)

    def forward(self, token_ids: torch.Tensor, step: AttentionStep, pages: KVPages) -> torch.Tensor:
        """Map int64 [N] token ids of a step to hidden states [N, hidden_size]; writes the tokens' KV."""
        x = embed(self.embed.weight, token_ids, self._ranks)
        if self.operations is None:
            self.operations = operations_for(Rotary.of(self.config.ropes, self.config.head_dim, x.dtype, x.device))
        operations = self.operations(step.batch)
        branch = None
        for index, layer in enumerate(self.layers):
            x, branch = layer(x, branch, operations, step, pages.layer(index))
        return x if branch is None else x + branch

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [R, hidden_size] to float32 of the same shape, normed as for logits."""
        normed: torch.Tensor = self.norm(hidden)
        return normed.float()

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [R, hidden_size] to float32 [R, vocab_size], in `out` if it is given. Pass only rows that sample."""
        table = self.embed.weight if self.lm_head is None else self.lm_head.weight
        found = self._ranks.columns(F.linear(self.norm(hidden), table), self.config.vocab_size)
        return found.float() if out is None else out.copy_(found)
