"""One decoder for all supported model families; `ModelConfig` selects the variation of each part.

    embed ─▶ x ─┬─ norm ─ qkv ─ (q/k norm) ─ rotate ─ attention ─ output ─ (norm) ─ + ─┬─ norm ─ MLP ─ (norm) ─ + ▶
                └───────────────────────────────────────────────────────────────────┘  └────────────────────────┘

All tensors are ragged: dim 0 is the N tokens of a step, of all its requests. A sum and the norm that
follows it are one operation, so a layer returns x and its MLP's output, not yet added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.base import AttentionStep
from engine.attention.batch import AttentionBatch
from engine.attention.chunked import cut_of
from engine.attention.kv_pages import UNSCALED, KVPages
from engine.attention.layer_groups import steps_of
from engine.attention.state_slots import LayerState
from engine.layers.linear import Rounded, multiply, rounds
from engine.layers.operations import Operations, Rotary
from engine.model_config.config import ModelConfig
from engine.model_parts.parts import LatentAttentionConfig
from engine.models.delta_net import GatedDeltaNet
from engine.models.expert_copies import ExpertCopies
from engine.models.expert_load import ExpertLoad
from engine.models.experts import Experts
from engine.models.experts_and_mlp import ExpertsAndMLP
from engine.models.latent_attention import LatentAttention
from engine.models.layer_inputs import InputBranch, LayerInputs
from engine.models.mlp import MLP
from engine.models.select_operations import operations_for
from engine.models.variations import later_scales, norm_all_heads, normed_heads, scaled_logits, with_normed_values
from engine.parallel.collective import ALONE, Collective
from engine.parallel.context_attention import step_written, whole_slots
from engine.parallel.vocabulary import embed


class Attention(nn.Module):
    """Attention with fused projections: one matrix for queries, keys and values."""

    def __init__(self, config: ModelConfig, layer: int, ranks: Collective) -> None:
        super().__init__()
        shape, kind = config.attention_in(layer), config.layers[layer]
        self._shape, self._eps, self._ranks = shape, config.norms.eps, ranks
        self._window, self._rope = kind.window, config.rotations.index(config.rotation_of(layer))
        self._is_cut, is_turned = kind.chunk is not None, kind.rope is not None
        later = shape.later_scale
        self._later = None if later is None or (later.is_of_unturned and is_turned) else later
        self._is_unit = shape.qk_norm == "unit" and is_turned
        self.kv_scales = UNSCALED
        """Scales of float8 pages, set when the model is loaded for them."""
        self.qkv_proj = nn.Linear(config.hidden_size, shape.qkv_outputs, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, config.hidden_size, bias=shape.output_bias)
        # One row per head, so that queries and keys are normed in one operation.
        normed = torch.empty(shape.normed_heads, shape.head_dim)
        self.qk_norm = None if shape.qk_norm in ("none", "unit") else nn.Parameter(normed)
        self.sinks = nn.Parameter(torch.empty(shape.num_heads)) if shape.has_sinks else None

    @property
    def rounds(self) -> int:
        """Numbers of its input that share a scale if the input may be rounded; otherwise 0."""
        return rounds(self.qkv_proj)

    def forward(
        self, x: torch.Tensor | Rounded, operations: Operations, step: AttentionStep, pages: torch.Tensor
    ) -> torch.Tensor:
        """Map [N, hidden_size] to the same shape."""
        heads, norm = self.qkv_proj(x).unflatten(1, (-1, self._shape.head_dim)), self.qk_norm
        gates = None
        if self._shape.has_output_gate:
            gates, heads = heads.tensor_split((self._shape.num_heads,), dim=1)
        if norm is not None and self._shape.qk_norm == "full":
            heads, norm = norm_all_heads(heads, norm, self._shape.num_heads, self._eps, self._ranks), None
        elif self._is_unit:
            norm = heads.new_ones(self._shape.num_heads + self._shape.num_kv_heads, self._shape.head_dim)
        if not self._shape.projects_keys:
            query = operations.rotate(normed_heads(heads, norm, self._eps), self._rope)
        else:
            if self._shape.norms_values:
                heads = with_normed_values(heads, self._shape, self._eps)
            written = step_written(step, pages)
            query = operations.rotate_into(written, heads, self._rope, norm, self._eps, self.kv_scales)
        if self._later is not None:
            query = query * later_scales(self._later, step.batch.positions).to(query.dtype)
        if self._is_cut:
            step = cut_of(step)
        attended = step.attend(pages, query, self._window, self.kv_scales, self.sinks)
        if gates is not None:
            attended = attended * gates.flatten(1).sigmoid()
        output: torch.Tensor = self.o_proj(attended)
        return output


class Layer(nn.Module):
    """Attention, or a gated delta net, and MLP, summed over all ranks and added to the residual stream; their
    inputs, their outputs or both are normed. One operation sums, adds and norms.
    """

    def __init__(self, config: ModelConfig, layer: int, ranks: Collective) -> None:
        super().__init__()
        self._ranks = ranks
        self._stream_eps, self._eps = config.stream_eps, config.norms.eps
        before, after = config.norms.before, config.norms.after
        self.input_norm = nn.RMSNorm(config.hidden_size, eps=config.stream_eps) if before else None
        self.attention = _mixer(config, layer, ranks)
        self.attended_norm = nn.RMSNorm(config.hidden_size, eps=config.norms.eps) if after else None
        self.post_norm = nn.RMSNorm(config.hidden_size, eps=config.stream_eps) if before else None
        experts = config.experts_in(layer)
        self.mlp: MLP | Experts | ExpertsAndMLP
        if experts is None:
            self.mlp = MLP(config.mlp_in(layer), config.hidden_size)
        elif experts.are_next_to_mlp:
            self.mlp = ExpertsAndMLP(config.mlp_in(layer), experts, config.hidden_size, config.norms.eps, ranks)
        else:
            self.mlp = Experts(experts, config.hidden_size)
        self.output_norm = nn.RMSNorm(config.hidden_size, eps=config.norms.eps) if after else None
        self.inputs = None
        if config.inputs is not None:
            self.inputs = InputBranch(config.inputs, config.hidden_size, config.norms.eps)
        self.scale = nn.Parameter(torch.empty(1)) if config.norms.scales_layers else None

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
        """Map the residual stream and the branch to add, [N, hidden_size] each, to those after this layer.

        Branches are this rank's parts, not summed yet, unless their sums are normed before they are added. `own`
        is the tokens' input for only this layer (`LayerInputs`). To `inner`, if it is given, the stream with the
        branch added is appended.
        """
        x, normed = self._add(x, branch, self.input_norm, operations, rounds=self.attention.rounds)
        if inner is not None:
            inner.append(x.clone())  # Later operations may add to x in place.
        branch = self._norm(self.attention(normed, operations, step, pages), self.attended_norm, operations)
        x, normed = self._add(x, branch, self.post_norm, operations, rounds=self.mlp.rounds)
        if isinstance(self.mlp, ExpertsAndMLP):
            branch = self._norm(self.mlp(x, normed, operations), self.output_norm, operations, is_summed=True)
        else:
            branch = self._norm(self.mlp(normed, operations), self.output_norm, operations)
        if self.scale is None:
            return x, branch
        x = x + branch
        if self.inputs is not None and own is not None:
            x = x + self.inputs(x, own, operations)
        return x * self.scale, None

    def _add(
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None,
        norm: nn.RMSNorm | None,
        operations: Operations,
        *,
        rounds: int,
    ) -> tuple[torch.Tensor, torch.Tensor | Rounded]:
        """Return the stream with the branch added, and the next branch's input, rounded if the branch `rounds`."""
        if norm is None:
            x = x if branch is None else x + branch
            return x, x
        if self.attended_norm is None:
            return self._ranks.add_norm(operations, x, branch, norm.weight, self._stream_eps, rounds=rounds)
        if rounds:
            return operations.add_norm_fp8(x, branch, norm.weight, self._stream_eps, rounds)
        return operations.add_norm(x, branch, norm.weight, self._stream_eps)

    def _norm(
        self, part: torch.Tensor, norm: nn.RMSNorm | None, operations: Operations, *, is_summed: bool = False
    ) -> torch.Tensor:
        """Return a branch's output, summed over all ranks unless it `is_summed`, and normed by `norm` if given."""
        if norm is None:
            return part
        whole = part if is_summed else self._ranks.sum(part)
        return operations.add_norm(whole, None, norm.weight, self._eps)[1]


def _mixer(config: ModelConfig, layer: int, ranks: Collective) -> Attention | LatentAttention | GatedDeltaNet:
    """Return the module that mixes a layer's tokens: a kind of attention, or a gated delta net."""
    if config.layers[layer].is_recurrent:
        return GatedDeltaNet(config)
    is_latent = isinstance(config.attention, LatentAttentionConfig)
    return LatentAttention(config, layer) if is_latent else Attention(config, layer, ranks)


class Decoder(nn.Module):
    """The whole model. It is created on the meta device or empty; `load_weights` fills it."""

    def __init__(self, config: ModelConfig, ranks: Collective = ALONE) -> None:
        """`config` is the shape of this rank's layers (`Shard.of`)."""
        super().__init__()
        self.config = config
        self._ranks, self._rotations = ranks, config.rotations
        self.first_layer = 0
        """Number of layers on earlier stages."""
        self.inner_layers: tuple[int, ...] = ()
        """Layers before which the residual stream is a part of the hidden states too: [N, hidden_size] after the
        last layer, then as much for each of these."""
        self._embedding_scale = None if config.embedding_scale == 1 else config.embedding_scale
        self.operations: Callable[[AttentionBatch], Operations] | None = None
        """Makes a step's operations; selected for the device at the first step."""
        # Pass the weight: otherwise nn.Embedding draws random numbers, for which torch imports its compiler.
        rows = ranks.shard.num_rows(config.vocab_size)
        table = torch.empty(rows, config.hidden_size)
        self.embed = nn.Embedding(rows, config.hidden_size, _weight=table)
        self.inputs: nn.Module | None = None
        if config.inputs is not None:
            self.inputs = LayerInputs(config.inputs, config.hidden_size, config.num_layers, config.norms.eps)
        self.layers = nn.ModuleList(Layer(config, index, ranks) for index in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.stream_eps)
        self.lm_head = None if config.tied_embeddings else nn.Linear(config.hidden_size, rows, bias=False)
        self.head_few_rows: frozenset[int] = frozenset()
        """Like `PlainLinear.few_rows`, for the output head."""
        self.expert_load: ExpertLoad | None = None
        """The tokens of each expert, if they are counted."""
        self.expert_copies: ExpertCopies | None = None
        """This rank's copies of other ranks' experts, if there are slots for them."""

    def count_experts(self) -> None:
        """Count the tokens of each expert from now on."""
        layers = [layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts | ExpertsAndMLP)]
        if layers:
            assert self.config.experts is not None
            count, device = self.config.experts.num_experts, self.embed.weight.device
            self.expert_load = ExpertLoad(len(layers), count, self._ranks.shard.size, device)
            for number, experts in enumerate(layers):
                experts.on_chosen = self.expert_load.of_layer(number)

    def copy_experts(self, num_copies: int) -> None:
        """Make room for so many copies of other ranks' experts in each layer."""
        layers = [layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)]
        self.expert_copies = ExpertCopies(layers, num_copies, self._ranks)

    def forward(
        self, token_ids: torch.Tensor, step: AttentionStep, pages: KVPages, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Map int64 [N] token ids of a step, or the hidden states `received` from the stage before, to hidden
        states [N, hidden_size], or more with `inner_layers`; writes the tokens' KV.
        """
        x = self._embedded(token_ids) if received is None else received
        if self.operations is None:
            ropes, turned = zip(*self._rotations, strict=True)
            self.operations = operations_for(Rotary.of(ropes, turned, x.dtype, x.device))
        steps = steps_of(step)
        operations = [self.operations(each.batch) for each in steps]
        branch, inner = None, list[torch.Tensor]()
        owns: Sequence[torch.Tensor | None] = [None] * len(self.layers)
        if self.inputs is not None:
            start = x if received is None else self._embedded(token_ids)
            owns = self.inputs(token_ids, start).unbind(1)[self.first_layer :]
        for index, (layer, own) in enumerate(zip(self.layers, owns, strict=False)):
            group = pages.places[index].group
            kept = inner if index in self.inner_layers else None
            x, branch = layer(x, branch, operations[group], steps[group], pages.memory(index), own, kept)
        if self.expert_load is not None:
            self.expert_load.add(whole_slots(steps[0]))
        x = self._added(x, branch)
        return torch.cat((x, *inner), -1) if inner else x

    def _added(self, x: torch.Tensor, branch: torch.Tensor | None) -> torch.Tensor:
        if branch is None:
            return x
        return x + (branch if self.config.norms.after else self._ranks.sum(branch))

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = embed(self.embed.weight, token_ids, self._ranks)
        return x if self._embedding_scale is None else x * self._embedding_scale

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states of R tokens to float32 [R, hidden_size], normed as for logits."""
        return self._norm(hidden).float()

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map hidden states of R tokens to float32 [R, vocab_size], in `out` if it is given. Pass only rows that
        sample.
        """
        table = self.embed.weight if self.lm_head is None else self.lm_head.weight
        product = multiply(self._norm(hidden), table, None, self.head_few_rows)
        found = self._ranks.columns(product, self.config.vocab_size)
        return scaled_logits(found.float() if out is None else out.copy_(found), self.config.scales)

    def _norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return normed_by(self.norm, hidden[:, : self.config.hidden_size] if self.inner_layers else hidden)


def normed_by(norm: nn.RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
    """Map [R, hidden_size] to the same shape and type. The norm's weights may be float32 in any model."""
    wide = hidden if norm.weight.dtype == hidden.dtype else hidden.float()
    return F.rms_norm(wide, norm.weight.shape, norm.weight, norm.eps).to(hidden.dtype)
