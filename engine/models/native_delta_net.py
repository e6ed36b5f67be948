"""Gated delta nets with the native CPU kernels, from the convolution to the gated norm."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.attention.state_batch import StateBatch, StateRow
from engine.attention.state_slots import LayerState
from engine.kernels import native
from engine.model_parts.parts import DeltaNetConfig

_MOST_DIM = 512
"""Largest dimension of heads, as in delta_net.c."""


def unsupported(shape: DeltaNetConfig, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot compute such a layer in `dtype`; None when they can."""
    for name, size in (("key_dim", shape.key_dim), ("value_dim", shape.value_dim)):
        if size % 32 or size > _MOST_DIM:
            return f"{name} {size}: not a multiple of 32 up to {_MOST_DIM}"
    try:
        native.kernels(dtype)
    except native.NativeUnavailable as error:
        return str(error)
    return None


class DeltaInputs(NamedTuple):
    """Outputs of the projections for a layer's heads and T tokens, replayed ones included."""

    mixed: torch.Tensor
    """[T, channels]: queries, keys and values before the convolution."""
    decay: torch.Tensor
    """float32 [T, num_value_heads]: logarithms of the factors by which states decay."""
    strength: torch.Tensor
    """float32 [T, num_value_heads]: strengths of the updates."""

    def at(self, tokens: torch.Tensor) -> DeltaInputs:
        """Return the inputs of some tokens."""
        return DeltaInputs(*(part[tokens] for part in self))


def strengths(
    gates: torch.Tensor, log_decay: torch.Tensor, decay_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map [T, 2 * num_value_heads] to the logarithm of the decay and to the strength of the update, float32
    [T, num_value_heads] each.
    """
    strength, decay = gates.chunk(2, 1)
    decay = -log_decay.float().exp() * F.softplus(decay.float() + decay_bias)
    return decay, strength.sigmoid().float()


class NativeDeltaHeads:
    """A layer's heads. For one thread at a time."""

    strengths = staticmethod(strengths)

    def __init__(
        self,
        shape: DeltaNetConfig,
        conv: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        isa: str | None = None,
    ) -> None:
        """Copy the weights of the convolution, [channels, kernel], and of the norm, [value_dim]. Raises
        native.NativeUnavailable.
        """
        self._kernels = native.kernels(conv.dtype, isa)
        # The struct points to these.
        self._conv = conv.detach().float().t().contiguous()
        self._norm = norm.detach().float().contiguous()
        self._net = native.NativeDeltaNet(
            self._conv.data_ptr(),
            self._norm.data_ptr(),
            shape.num_key_heads,
            shape.num_value_heads,
            shape.key_dim,
            shape.value_dim,
            shape.kernel,
            shape.channels,
            eps,
        )
        self._workspace = native.Workspace()

    def step(
        self,
        inputs: DeltaInputs,
        z: torch.Tensor,
        state: LayerState,
        sources: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        """Advance the states of D rows by one token each; return [D, num_value_heads * value_dim].

        z: of that shape, gates of the output; sources, targets: int64 [D]; no row's target is another's source
        """
        mixed, decay, strength, z = _readable(inputs, z)
        sources, targets = sources.contiguous(), targets.contiguous()
        out = torch.empty(z.shape, dtype=z.dtype)
        parts = mixed, decay, strength, z, out, sources, targets
        rows = native.NativeDeltaSteps(
            *(part.data_ptr() for part in parts), mixed.stride(0), z.stride(0), len(mixed)
        )
        states = _states(state)
        self._kernels.delta_step(
            ctypes.byref(self._net), ctypes.byref(states), ctypes.byref(rows), torch.get_num_threads()
        )
        return out

    def run(self, inputs: DeltaInputs, z: torch.Tensor, state: LayerState, batch: StateBatch) -> torch.Tensor:
        """Advance each row's state by all its tokens; return [N, num_value_heads * value_dim].

        No row keeps a state in a slot with which another begins. z: of that shape, gates of the output, which
        replayed tokens do not have
        """
        if batch.pieces is None:
            return self.step(inputs, z, state, batch.sources, batch.targets)
        mixed, decay, strength, z = _readable(inputs, z)
        out = torch.empty(z.shape, dtype=z.dtype)
        rows = (native.NativeDeltaRow * len(batch.rows))(
            *(_row(row, (mixed, decay, strength), (z, out)) for row in batch.rows)
        )
        threads, states = torch.get_num_threads(), _states(state)
        memory = self._workspace.address(self._kernels.delta_rows_bytes(ctypes.byref(self._net), threads))
        self._kernels.delta_rows(ctypes.byref(self._net), ctypes.byref(states), rows, len(rows), memory, threads)
        if len(plain := batch.plain):
            out[plain] = self.step(inputs.at(plain), z[plain], state, batch.sources, batch.targets)
        return out


def _row(row: StateRow, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> native.NativeDeltaRow:
    """inputs: mixed, decay, strength of all tokens; outputs: z and out of those that are not replayed."""
    _, num_tokens, source, kept = row.advance
    return native.NativeDeltaRow(
        *(_address(part, row.begin) for part in inputs),
        *(_address(part, row.first) for part in outputs),
        _places(kept),
        inputs[0].stride(0),
        outputs[0].stride(0),
        source,
        num_tokens,
        row.num_replayed,
        len(kept),
    )


def _address(part: torch.Tensor, token: int) -> int:
    return part.data_ptr() + token * part.stride(0) * part.itemsize


def _readable(inputs: DeltaInputs, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the same with the strides that the kernels expect."""
    mixed, z = (part if part.stride(1) == 1 else part.contiguous() for part in (inputs.mixed, z))
    return mixed, inputs.decay.contiguous(), inputs.strength.contiguous(), z


def _places(kept: Sequence[tuple[int, int]]) -> ctypes.Array[native.NativeDeltaKept]:
    return (native.NativeDeltaKept * len(kept))(*(native.NativeDeltaKept(end, slot) for end, slot in kept))


def _states(state: LayerState) -> native.NativeDeltaStates:
    return native.NativeDeltaStates(state.inputs.data_ptr(), state.matrices.data_ptr())
