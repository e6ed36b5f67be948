"""A gated delta net, a layer with a state of constant size instead of KV (Yang et al. 2024, arXiv:2412.06464).

    x ─┬─ queries, keys, values ─ convolution over time, SiLU ─▶ q, k, v ─┐
       ├─ decay g, strength beta ────────────────────────────────────────┼─▶ S, the state of each head ─▶ S q
       └─ z ────────────────────────────────────────────────────────────── gated norm, output ◀──────────┘

Each token makes the state decay by a factor and learn the value of its key:

    S ← exp(g) S        S ← S + k (beta (v - S k))ᵀ        output S q

Decodes do just that. Prompts are computed in pieces, whose updates are the solution of a triangular system
(section 3.3 of the paper): by native kernels on CPUs, by Triton's on GPUs, or else by torch. The state is always
float32.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.base import AttentionStep
from engine.attention.state_batch import StateBatch
from engine.attention.state_slots import LayerState
from engine.attention.step_in_pieces import StepInPieces
from engine.layers.operations import Operations
from engine.model_config.config import ModelConfig
from engine.model_parts.parts import DeltaNetConfig
from engine.models.native_delta_net import DeltaInputs, NativeDeltaHeads, unsupported
from engine.models.torch_delta_net import TorchDeltaHeads


class GatedDeltaNet(nn.Module):
    """One recurrent layer. Ranks have the states of their own heads."""

    rounds = 0
    """Its input may not be rounded, because its gates read it too."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = config.delta_net
        assert shape is not None
        self.shape, self._eps = shape, config.norms.eps
        self.in_proj = nn.Linear(config.hidden_size, shape.channels + shape.values, bias=False)
        # Not a linear layer, which would be quantized: it is small, and errors of decays accumulate over a text.
        self.gates_proj = nn.Parameter(torch.empty(2 * shape.num_value_heads, config.hidden_size))
        self.conv = nn.Parameter(torch.empty(shape.channels, shape.kernel))
        self.log_decay = nn.Parameter(torch.empty(shape.num_value_heads))
        self.decay_bias = nn.Parameter(torch.empty(shape.num_value_heads))
        self.norm = nn.Parameter(torch.empty(shape.value_dim))
        self.o_proj = nn.Linear(shape.values, config.hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, operations: Operations, step: AttentionStep, state: LayerState
    ) -> torch.Tensor:
        """Map [N, hidden_size] to the same shape; reads and writes the step's states."""
        mixed, z = self.in_proj(x).tensor_split((self.shape.channels,), dim=1)
        gates = F.linear(x, self.gates_proj)
        inputs = DeltaInputs(mixed, *self._strengths(gates))
        if isinstance(step, StepInPieces):
            gated = self._gated_outside(inputs, gates, z, step, state)
        else:
            batch = _states_of(step)
            gated = self.heads.run(self._with_replays(inputs, gates, state, batch), z, state, batch)
        output: torch.Tensor = self.o_proj(gated)
        return output

    def _gated_outside(
        self, inputs: DeltaInputs, gates: torch.Tensor, z: torch.Tensor, step: StepInPieces, state: LayerState
    ) -> torch.Tensor:
        """Return what `run` of its heads does, with states advanced between two pieces."""
        heads = self.heads
        assert isinstance(heads, TorchDeltaHeads), "graphs are for GPUs"

        def advance(step: AttentionStep, gates: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
            batch = _states_of(step)
            return heads.advance(self._with_replays(DeltaInputs(*inputs), gates, state, batch), state, batch)

        shape = self.shape.num_value_heads, self.shape.value_dim
        return heads.gated(step.outside(advance, shape, torch.float32, gates, *inputs), z)

    @cached_property
    def heads(self) -> NativeDeltaHeads | TorchDeltaHeads:
        """Its heads, by kernels if there are any. First used when the weights are loaded."""
        return kind_of_heads(self.shape, self.conv)(self.shape, self.conv, self.norm, self._eps)

    def _with_replays(
        self, inputs: DeltaInputs, gates: torch.Tensor, state: LayerState, batch: StateBatch
    ) -> DeltaInputs:
        """Return the inputs of all tokens, replayed ones included, and record the step's drafts for the next one.

        gates: [N, 2 * num_value_heads], the source of the decays and strengths in the step's inputs
        """
        replays, drafts = batch.replays, batch.drafts
        together = inputs
        if replays is not None:
            replayed = state.drafts[replays.slots, replays.positions].tensor_split((self.shape.channels,), dim=1)
            mixed, both = map(replays.joined, replayed, (inputs.mixed, gates))
            together = DeltaInputs(mixed, *self._strengths(both))
        if drafts is not None:  # They may go to the slots of replayed tokens, which have been read.
            own = torch.cat((inputs.mixed[drafts.tokens], gates[drafts.tokens]), 1)
            state.drafts[drafts.slots, drafts.positions] = own.to(state.drafts.dtype)
        return together

    def _strengths(self, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.heads.strengths(gates, self.log_decay, self.decay_bias)


def _states_of(step: AttentionStep) -> StateBatch:
    states = step.batch.states
    assert states is not None, "a step of a recurrent model has states"
    return states


def kind_of_heads(shape: DeltaNetConfig, conv: torch.Tensor) -> type[NativeDeltaHeads | TorchDeltaHeads]:
    """Return the kind that computes on the device of these weights in their type."""
    if conv.device.type == "cpu":
        return TorchDeltaHeads if unsupported(shape, conv.dtype) else NativeDeltaHeads
    if conv.device.type == "cuda":
        with suppress(ImportError):  # A warning was logged when the sampler was chosen.
            from engine.models.triton_delta_net import TritonDeltaHeads

            return TritonDeltaHeads
    return TorchDeltaHeads
