"""A gated delta net, a layer with a state of constant size instead of KV (Yang et al. 2024, arXiv:2412.06464).

    x ─┬─ queries, keys, values ─ convolution over time, SiLU ─▶ q, k, v ─┐
       ├─ decay g, strength beta ────────────────────────────────────────┼─▶ S, the state of each head ─▶ S q
       └─ z ────────────────────────────────────────────────────────────── gated norm, output ◀──────────┘

Each token makes the state decay by a factor and learn the value of its key:

    S ← exp(g) S        S ← S + k (beta (v - S k))ᵀ        output S q

Decodes do just that. Prompts are computed in pieces of up to `_PIECE` tokens, whose updates are the solution of a
triangular system (section 3.3 of the paper). On CPUs, native kernels do both; on GPUs, a Triton kernel does
decodes. The state is always float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.base import AttentionStep
from engine.attention.state_batch import StateRow
from engine.attention.state_slots import LayerState
from engine.layers.operations import Operations
from engine.model_config.config import ModelConfig
from engine.model_parts.parts import DeltaNetConfig
from engine.models.native_delta_net import DeltaInputs, DeltaRun, NativeDeltaHeads, unsupported

_PIECE = 64
_UNIT_EPS = 1e-6
"""Epsilon of the norms that make queries and keys unit vectors, independent of the model's other norms."""


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
        batch = step.batch.states
        assert batch is not None, "a step of a recurrent model has states"
        mixed, z = self.in_proj(x).tensor_split((self.shape.channels,), dim=1)
        gates = F.linear(x, self.gates_proj)
        inputs = DeltaInputs(mixed, *self._strengths(gates), z)
        if not batch.rows:
            gated = self.heads.step(inputs, state, batch.sources, batch.targets)
        else:
            gated = torch.empty_like(z)
            if len(batch.plain):
                gated[batch.plain] = self.heads.step(inputs.at(batch.plain), state, batch.sources, batch.targets)
            runs = [self._run_of(inputs, gates, state, row) for row in batch.rows]
            for row, output in zip(batch.rows, self.heads.run(runs, state), strict=True):
                gated[row.first : row.first + row.num_tokens] = output
        result: torch.Tensor = self.o_proj(gated)
        return result

    @cached_property
    def heads(self) -> NativeDeltaHeads | TorchDeltaHeads:
        """Its heads, by the native kernels if there are any. First used when the weights are loaded."""
        if self.conv.device.type != "cpu" or unsupported(self.shape, self.conv.dtype):
            return TorchDeltaHeads(self.shape, self.conv, self.norm, self._eps)
        return NativeDeltaHeads(self.shape, self.conv, self.norm, self._eps)

    def _run_of(self, inputs: DeltaInputs, gates: torch.Tensor, state: LayerState, row: StateRow) -> DeltaRun:
        """Return the tokens of a row, replayed ones first, and record its drafts for the next step.

        gates: [N, 2 * num_value_heads], the source of the decays and strengths in the step's inputs
        """
        own = slice(row.first, row.first + row.num_tokens)
        num_replayed, num_channels = row.num_replayed, self.shape.channels
        run = inputs.at(own)
        if num_replayed:
            # A copy, because this step's drafts may go to the same slot.
            mixed, earlier = state.drafts[row.source, :num_replayed].clone().tensor_split((num_channels,), dim=1)
            decay, strength = self._strengths(earlier)
            run = DeltaInputs(
                torch.cat((mixed, run.mixed)),
                torch.cat((decay, run.decay)),
                torch.cat((strength, run.strength)),
                run.z,
            )
        if row.has_drafts:
            drafts = state.drafts[row.target, : row.num_tokens]
            drafts[:, :num_channels], drafts[:, num_channels:] = inputs.mixed[own], gates[own]
        last = num_replayed if row.has_drafts else len(run.mixed)
        kept = [(num_replayed + position, slot) for position, slot in row.borders]
        return DeltaRun(run, num_replayed, row.source, [*kept, (last, row.target)])

    def _strengths(self, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map [T, 2 * num_value_heads] to the logarithm of the decay and to the strength of the update, float32
        [T, num_value_heads] each.
        """
        strength, decay = gates.chunk(2, 1)
        decay = -self.log_decay.float().exp() * F.softplus(decay.float() + self.decay_bias)
        return decay, strength.sigmoid().float()


class TorchDeltaHeads:
    """A layer's heads by torch, on any device: what `NativeDeltaHeads` does on a CPU."""

    def __init__(self, shape: DeltaNetConfig, conv: torch.Tensor, norm: torch.Tensor, eps: float) -> None:
        """conv: [channels, kernel]; norm: [value_dim]."""
        self._shape, self._conv, self._norm, self._eps = shape, conv, norm, eps
        self._advance_slots = slots_advancer(conv.device)

    def step(
        self, inputs: DeltaInputs, state: LayerState, sources: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Advance the states of D rows by one token each; return [D, num_value_heads * value_dim].

        sources, targets: int64 [D]
        """
        seen = torch.cat((state.inputs.index_select(0, sources), inputs.mixed[:, None]), 1)
        state.inputs.index_copy_(0, targets, seen[:, 1:])
        query, key, value = self._split(F.silu((seen * self._conv.t()).sum(1)))
        found = self._advance_slots(
            state.matrices, sources, targets, query, key, value, inputs.decay, inputs.strength
        )
        return self._gated(found, inputs.z)

    def run(self, runs: Sequence[DeltaRun], state: LayerState) -> list[torch.Tensor]:
        """Advance each row's state by all its tokens; return, for each row, [T - num_replayed,
        num_value_heads * value_dim].
        """
        return [self._run_one(run, state) for run in runs]

    def _run_one(self, run: DeltaRun, state: LayerState) -> torch.Tensor:
        mixed, decay, strength, z = run.inputs
        seen = torch.cat((state.inputs[run.source], mixed))
        # Depthwise: each channel by itself, over time.
        convolved = F.conv1d(seen.t()[None], self._conv[:, None], groups=self._shape.channels)[0].t()
        query, key, value = (part.transpose(0, 1) for part in self._split(F.silu(convolved)))
        decay, strength = decay.t(), strength.t()
        matrices, outputs, begin = state.matrices[run.source], [], 0
        for end, slot in [*run.kept, (len(mixed), None)]:
            part = slice(begin, end)
            output, matrices = advance_by_many(
                matrices, query[:, part], key[:, part], value[:, part], decay[:, part], strength[:, part]
            )
            outputs.append(output)
            begin = end
            if slot is not None:
                state.matrices[slot] = matrices
                state.inputs[slot] = seen[end : end + self._shape.kernel - 1]
        return self._gated(torch.cat(outputs, 1)[:, run.num_replayed :].transpose(0, 1), z)

    def _gated(self, found: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Norm and gate the queries' results, float32 [T, num_value_heads, value_dim]; return the shape of z."""
        normed = F.rms_norm(found, (self._shape.value_dim,), eps=self._eps) * self._norm
        gated = normed * F.silu(z.unflatten(1, normed.shape[1:]).float())
        return gated.to(z.dtype).flatten(1)

    def _split(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split [T, channels] into queries, keys and values of each value head, float32 [T, num_value_heads, dim].
        Queries and keys are unit vectors, and queries are scaled.
        """
        shape, wide = self._shape, mixed.float()
        keys = shape.num_key_heads * shape.key_dim
        query, key, value = wide.tensor_split((keys, 2 * keys), dim=1)
        each = shape.num_value_heads // shape.num_key_heads
        query, key = (
            _unit(part.unflatten(1, (-1, shape.key_dim))).repeat_interleave(each, 1) for part in (query, key)
        )
        return query * shape.key_dim**-0.5, key, value.unflatten(1, (-1, shape.value_dim))


def slots_advancer(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return `advance_slots`, as a Triton kernel on a GPU where Triton imports."""
    if device.type == "cuda":
        try:
            from engine.kernels.triton.delta_net import advance_slots as by_triton
        except ImportError:  # A warning was logged when the sampler was chosen.
            return advance_slots
        return by_triton
    return advance_slots


def advance_slots(
    slots: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, *inputs: torch.Tensor
) -> torch.Tensor:
    """Advance the states of D rows by one token, each from its source to its target; return [D, H, value_dim].

    slots: float32 [num_slots, H, key_dim, value_dim]; sources, targets: int64 [D]; inputs: as of `advance`
    """
    matrices = slots.index_select(0, sources)
    found = advance(matrices, *inputs)
    slots.index_copy_(0, targets, matrices)
    return found


def advance(
    matrices: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
) -> torch.Tensor:
    """Advance the states of D rows by one token, in place; return [D, H, value_dim].

    matrices: [D, H, key_dim, value_dim]; query, key: [D, H, key_dim]; value: [D, H, value_dim]
    decay, strength: [D, H]
    """
    matrices.mul_(decay.exp()[..., None, None])
    known = (key[..., None, :] @ matrices).squeeze(-2)
    learned = (value - known) * strength[..., None]
    matrices.add_(key[..., :, None] * learned[..., None, :])
    return (query[..., None, :] @ matrices).squeeze(-2)


def advance_by_many(
    matrices: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of T tokens of one row, [H, T, value_dim], and the states after them.

    matrices: [H, key_dim, value_dim]; query, key: [H, T, key_dim]; value: [H, T, value_dim]
    decay, strength: [H, T]
    """
    outputs = [value[:, :0]]
    for begin in range(0, value.shape[1], _PIECE):
        part = slice(begin, begin + _PIECE)
        output, matrices = _piece(
            matrices, query[:, part], key[:, part], value[:, part], decay[:, part], strength[:, part]
        )
        outputs.append(output)
    return torch.cat(outputs, 1), matrices


def _piece(
    matrices: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `advance_by_many` for few tokens."""
    total = decay.cumsum(1)  # of the piece's tokens so far, in logarithms
    later = torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=total.device).triu(1)
    between = (total[:, :, None] - total[:, None, :]).masked_fill(later, -torch.inf).exp()
    taught = key * strength[..., None]
    # A token's update depends on the updates of those before it: a unit lower triangular system.
    system = (taught @ key.transpose(1, 2)) * between
    known = torch.cat((value * strength[..., None], taught * total.exp()[..., None]), -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    learned, recalled = solved.tensor_split((value.shape[-1],), dim=-1)
    learned = learned - recalled @ matrices
    output = (query * total.exp()[..., None]) @ matrices
    output = output + ((query @ key.transpose(1, 2)) * between) @ learned
    kept = key * (total[:, -1:] - total).exp()[..., None]
    return output, matrices * total[:, -1:, None].exp() + kept.transpose(1, 2) @ learned


def _unit(heads: torch.Tensor) -> torch.Tensor:
    return heads * (heads.square().sum(-1, keepdim=True) + _UNIT_EPS).rsqrt()
