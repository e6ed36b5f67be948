"""Layers of gated delta nets with random weights, inputs and states, and what their heads compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.attention.state_batch import StateBatch, StateRow
from engine.attention.state_slots import LayerState
from engine.model_config.config import ModelConfig
from engine.model_files.model_directory import demo_model_path
from engine.model_parts.parts import DeltaNetConfig
from engine.models.delta_net import GatedDeltaNet
from engine.models.native_delta_net import DeltaInputs, NativeDeltaHeads
from engine.models.torch_delta_net import TorchDeltaHeads

FACTS = ModelConfig.from_directory(demo_model_path())
EPS = FACTS.norms.eps
NUM_SLOTS = 9


def layer_of(shape: DeltaNetConfig) -> GatedDeltaNet:
    """A layer with random weights."""
    layer = GatedDeltaNet(replace(FACTS, delta_net=shape))
    torch.nn.init.normal_(layer.conv, std=0.5)
    torch.nn.init.normal_(layer.log_decay)
    torch.nn.init.normal_(layer.decay_bias)
    torch.nn.init.normal_(layer.norm)
    return layer.requires_grad_(False)


def state_of(shape: DeltaNetConfig, dtype: torch.dtype) -> LayerState:
    matrices = torch.randn(NUM_SLOTS, shape.num_value_heads, shape.key_dim, shape.value_dim) / shape.key_dim**0.5
    return LayerState(torch.randn(NUM_SLOTS, shape.kernel - 1, shape.channels).to(dtype), matrices, torch.empty(0))


def copy_of(state: LayerState, dtype: torch.dtype | None = None) -> LayerState:
    return LayerState(*(part.to(dtype or part.dtype, copy=True) for part in state))


class Inputs(NamedTuple):
    """Inputs of heads: those of all tokens, and the gates of the outputs of those that are not replayed."""

    mixed: torch.Tensor
    decay: torch.Tensor
    strength: torch.Tensor
    z: torch.Tensor

    @property
    def of_heads(self) -> tuple[DeltaInputs, torch.Tensor]:
        """Both parts as heads take them."""
        return DeltaInputs(*self[:3]), self.z

    def run(self, heads: NativeDeltaHeads | TorchDeltaHeads, state: LayerState, batch: StateBatch) -> torch.Tensor:
        """What heads compute of them."""
        return heads.run(*self.of_heads, state, batch)


def inputs_of(layer: GatedDeltaNet, num_tokens: int, dtype: torch.dtype) -> Inputs:
    """Random inputs; of rows further apart than they are long, as projections give them."""
    channels, values = layer.shape.channels, layer.shape.values
    mixed, z = torch.randn(num_tokens, channels + values + 5).to(dtype)[:, :-5].tensor_split((channels,), dim=1)
    strength, decay = torch.randn(2, num_tokens, layer.shape.num_value_heads).to(dtype).float()
    decay = -layer.log_decay.exp() * F.softplus(decay + layer.decay_bias)
    return Inputs(mixed, decay, strength.sigmoid(), z)


def without_z(inputs: Inputs, num_replayed: int) -> Inputs:
    """The inputs of a run that replays its first tokens."""
    return inputs._replace(z=inputs.z[num_replayed:])


class Run(NamedTuple):
    """The tokens by which one row's state advances."""

    inputs: Inputs
    num_replayed: int
    source: int
    kept: list[tuple[int, int]]
    """Ascending numbers of tokens after which the state is kept, each with its slot."""


def step_of(runs: Sequence[Run]) -> tuple[Inputs, StateBatch]:
    """A step with these rows."""
    rows, first, begin = [], 0, 0
    for run in runs:
        num_tokens, (last, target) = len(run.inputs.z), run.kept[-1]
        borders = [(end - run.num_replayed, slot) for end, slot in run.kept[:-1]]
        has_drafts = last < len(run.inputs.mixed)
        rows.append(StateRow(first, begin, num_tokens, run.source, target, run.num_replayed, has_drafts, borders))
        first, begin = first + num_tokens, begin + len(run.inputs.mixed)
    inputs = Inputs(*(torch.cat(parts) for parts in zip(*(run.inputs for run in runs), strict=True)))
    return inputs, StateBatch.of(rows, first)


def wide(inputs: Inputs) -> Inputs:
    return Inputs(*(part.float() for part in inputs))


def recurrence(layer: GatedDeltaNet, run: Run, state: LayerState) -> torch.Tensor:
    """What a layer's heads compute, token by token in float64; `state` is float64 too. Follows
    arXiv:2412.06464, equation 10.
    """
    shape, (mixed, decay, strength, z) = layer.shape, (part.double() for part in run.inputs)
    seen, S = torch.cat((state.inputs[run.source], mixed)), state.matrices[run.source].clone()
    keys, each, outputs = shape.num_key_heads * shape.key_dim, shape.num_value_heads // shape.num_key_heads, []
    kept = {end: [slot for at, slot in run.kept if at == end] for end, _ in run.kept}
    for token in range(len(mixed) + 1):
        for slot in kept.get(token, ()):
            state.matrices[slot], state.inputs[slot] = S, seen[token : token + shape.kernel - 1]
        if token == len(mixed):
            break
        convolved = F.silu((seen[token : token + shape.kernel] * layer.conv.t().double()).sum(0))
        query, key, value = convolved.tensor_split((keys, 2 * keys))
        query, key = (
            (
                part.view(-1, shape.key_dim) / (part.view(-1, shape.key_dim).square().sum(1, True) + 1e-6).sqrt()
            ).repeat_interleave(each, 0)[:, :, None]
            for part in (query, key)
        )
        S = S * decay[token].exp()[:, None, None]
        learned = value.view(-1, 1, shape.value_dim) - key.transpose(1, 2) @ S
        S = S + strength[token][:, None, None] * key @ learned
        found = (query.transpose(1, 2) @ S)[:, 0] / shape.key_dim**0.5
        if token >= run.num_replayed:
            gate = F.silu(z[token - run.num_replayed].view(found.shape))
            normed = F.rms_norm(found, found.shape[1:], layer.norm.double(), EPS)
            outputs.append((normed * gate).flatten())
    return torch.stack(outputs)
