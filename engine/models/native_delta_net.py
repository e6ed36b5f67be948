"""One token's step of a gated delta net by the native CPU kernels: it reads and writes a state once."""

from __future__ import annotations

import ctypes

import torch

from engine.attention.state_slots import LayerState
from engine.kernels import native
from engine.models.parts import DeltaNetConfig

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


class NativeDeltaStep:
    """A layer's step for rows that advance by one token each."""

    def __init__(self, shape: DeltaNetConfig, conv: torch.Tensor, isa: str | None = None) -> None:
        """Copy the convolution's weights, [channels, kernel]. Raises native.NativeUnavailable."""
        self._kernel = native.kernels(conv.dtype, isa).delta_step
        self._conv = conv.detach().float().t().contiguous()  # The struct points to it.
        self._net = native.NativeDeltaNet(
            self._conv.data_ptr(),
            shape.num_key_heads,
            shape.num_value_heads,
            shape.key_dim,
            shape.value_dim,
            shape.kernel,
            shape.channels,
        )
        self._shape = shape

    def __call__(
        self,
        mixed: torch.Tensor,
        decay: torch.Tensor,
        strength: torch.Tensor,
        state: LayerState,
        sources: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        """Advance the states of D rows by one token each; return float32 [D, num_value_heads, value_dim].

        mixed: [D, channels]; decay, strength: float32 [D, num_value_heads], of the decay the logarithm
        sources, targets: int64 [D]; no row's target is another's source
        """
        mixed = mixed if mixed.stride(1) == 1 else mixed.contiguous()
        decay, strength = decay.contiguous(), strength.contiguous()
        sources, targets = sources.contiguous(), targets.contiguous()
        out = mixed.new_empty(
            (len(mixed), self._shape.num_value_heads, self._shape.value_dim), dtype=torch.float32
        )
        parts = mixed, decay, strength, sources, targets, state.inputs, state.matrices, out
        rows = native.NativeDeltaRows(*(part.data_ptr() for part in parts), mixed.stride(0), len(mixed))
        self._kernel(ctypes.byref(self._net), ctypes.byref(rows), torch.get_num_threads())
        return out
