"""The heads of a gated delta net by torch, on any device: the reference for the kernels on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.attention.state_batch import StateBatch
from engine.attention.state_slots import LayerState
from engine.model_parts.parts import DeltaNetConfig
from engine.models.native_delta_net import DeltaInputs, strengths

_PIECE = 64
"""Most tokens whose updates are computed together."""
_UNIT_EPS = 1e-6
"""Epsilon of the norms that make queries and keys unit vectors, independent of the model's other norms."""


class TorchDeltaHeads:
    """A layer's heads. Does what `NativeDeltaHeads` does on a CPU."""

    strengths = staticmethod(strengths)

    def __init__(self, shape: DeltaNetConfig, conv: torch.Tensor, norm: torch.Tensor, eps: float) -> None:
        """conv: [channels, kernel]; norm: [value_dim]."""
        self._shape, self._conv, self._norm, self._eps = shape, conv, norm, eps

    def step(
        self,
        inputs: DeltaInputs,
        z: torch.Tensor,
        state: LayerState,
        sources: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        """Implement `NativeDeltaHeads.step`."""
        return self.gated(self._advance_plain(inputs, state, sources, targets), z)

    def run(self, inputs: DeltaInputs, z: torch.Tensor, state: LayerState, batch: StateBatch) -> torch.Tensor:
        """Implement `NativeDeltaHeads.run`."""
        return self.gated(self.advance(inputs, state, batch), z)

    def advance(self, inputs: DeltaInputs, state: LayerState, batch: StateBatch) -> torch.Tensor:
        """Advance each row's state by all its tokens; return the results of the queries of its own ones, float32
        [N, num_value_heads, value_dim].
        """
        if batch.pieces is None:
            return self._advance_plain(inputs, state, batch.sources, batch.targets)
        found = self._advance_rows(inputs, state, batch)
        return found if batch.replays is None else found.index_select(0, batch.replays.others)

    def _advance_plain(
        self, inputs: DeltaInputs, state: LayerState, sources: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Advance the states of D rows by one token each; return float32 [D, num_value_heads, value_dim]."""
        seen = torch.cat((state.inputs.index_select(0, sources), inputs.mixed[:, None]), 1)
        state.inputs.index_copy_(0, targets, seen[:, 1:])
        query, key, value = self._split(F.silu((seen * self._conv.t()).sum(1)))
        matrices = state.matrices.index_select(0, sources)
        found = advance(matrices, query, key, value, inputs.decay, inputs.strength)
        state.matrices.index_copy_(0, targets, matrices)
        return found

    def _advance_rows(self, inputs: DeltaInputs, state: LayerState, batch: StateBatch) -> torch.Tensor:
        """Implement `advance` where some row is not plain; return the results of replayed tokens too."""
        pieces, plain = batch.pieces, batch.plain
        assert pieces is not None, "there is a row"
        shape = len(inputs.mixed), self._shape.num_value_heads, self._shape.value_dim
        found = torch.zeros(shape, device=inputs.mixed.device)
        for begin, source, first, last in pieces.rows[: len(pieces.rows) - len(plain)].tolist():
            self._run_one(inputs, state, begin, source, pieces.pieces[first:last].tolist(), found)
        if len(plain):
            found[plain] = self._advance_plain(inputs.at(plain), state, batch.sources, batch.targets)
        return found

    def _run_one(
        self,
        inputs: DeltaInputs,
        state: LayerState,
        begin: int,
        source: int,
        pieces: Sequence[Sequence[int]],
        found: torch.Tensor,
    ) -> None:
        """Write a row's results to `found`, [T, num_value_heads, value_dim]."""
        own = slice(begin, begin + sum(length for _, length, _, _ in pieces))
        if own.stop == begin:  # an empty row of a graph
            return
        mixed, decay, strength = (part[own] for part in inputs)
        seen = torch.cat((state.inputs[source], mixed))
        # Depthwise: each channel by itself, over time.
        convolved = F.conv1d(seen.t()[None], self._conv[:, None], groups=self._shape.channels)[0].t()
        query, key, value = (part.transpose(0, 1) for part in self._split(F.silu(convolved)))
        decay, strength = decay.t(), strength.t()
        matrices = state.matrices[source]
        for first, length, _, slot in pieces:
            part = slice(first - begin, first - begin + length)
            output, matrices = advance_by_many(
                matrices, query[:, part], key[:, part], value[:, part], decay[:, part], strength[:, part]
            )
            found[first : first + length] = output.transpose(0, 1)
            if slot >= 0:
                state.matrices[slot] = matrices
                state.inputs[slot] = seen[part.stop : part.stop + self._shape.kernel - 1]

    def gated(self, found: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
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
