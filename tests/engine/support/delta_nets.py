"""Layers of gated delta nets with random weights, inputs and states, and what their heads compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from engine.attention.state_slots import LayerState
from engine.kernels.delta_pieces import Advance, StatePieces
from engine.model_config.config import ModelConfig
from engine.model_files.model_directory import demo_model_path
from engine.model_parts.parts import DeltaNetConfig
from engine.models.delta_net import GatedDeltaNet
from engine.models.native_delta_net import DeltaInputs, DeltaRun

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


def inputs_of(layer: GatedDeltaNet, num_tokens: int, dtype: torch.dtype) -> DeltaInputs:
    """Random inputs; of rows further apart than they are long, as projections give them."""
    channels, values = layer.shape.channels, layer.shape.values
    mixed, z = torch.randn(num_tokens, channels + values + 5).to(dtype)[:, :-5].tensor_split((channels,), dim=1)
    strength, decay = torch.randn(2, num_tokens, layer.shape.num_value_heads).to(dtype).float()
    decay = -layer.log_decay.exp() * F.softplus(decay + layer.decay_bias)
    return DeltaInputs(mixed, decay, strength.sigmoid(), z)


def without_z(inputs: DeltaInputs, num_replayed: int) -> DeltaInputs:
    """The inputs of a run that replays its first tokens."""
    return DeltaInputs(inputs.mixed, inputs.decay, inputs.strength, inputs.z[num_replayed:])


def pieces_of(runs: Sequence[DeltaRun]) -> StatePieces:
    """The same rows in pieces."""
    return StatePieces.of(Advance(len(run.inputs.mixed), run.source, run.kept) for run in runs)


def wide(inputs: DeltaInputs) -> DeltaInputs:
    return DeltaInputs(*(part.float() for part in inputs))


def recurrence(layer: GatedDeltaNet, run: DeltaRun, state: LayerState) -> torch.Tensor:
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
