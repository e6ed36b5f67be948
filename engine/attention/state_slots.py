"""The memory of recurrent layers: slots, each with the state of all of them after some tokens.

A layer's state is the last inputs of its convolution and a matrix for each head. A step reads the state before a
chunk in one slot and writes that after it into another or the same. After draft tokens no state is written: the
slot keeps the state before them and their inputs, and the next step applies the accepted ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from engine.base.host_memory import untouched_zeros
from engine.model_config.config import ModelConfig
from engine.model_parts.parts import DeltaNetConfig


class LayerState(NamedTuple):
    """All slots of one layer."""

    inputs: torch.Tensor
    """[num_slots + 1, kernel - 1, channels]: the last inputs of the convolution, in order of their positions."""
    matrices: torch.Tensor
    """float32 [num_slots + 1, num_value_heads, key_dim, value_dim]."""
    drafts: torch.Tensor
    """[num_slots + 1, max_drafts + 1, channels + 2 * num_value_heads]: for tokens that the state does not contain
    yet, the inputs of the convolution and of the two gates."""


class StateSlots:
    """The states of all recurrent layers. The last slot is never written, always zero: the state before a text."""

    def __init__(
        self,
        num_layers: int,
        shape: DeltaNetConfig,
        num_slots: int,
        max_drafts: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate zeroed slots, with room for `max_drafts` draft tokens each. On a CPU, the system allocates
        memory when a slot is first written.
        """
        self.num_slots, self.dtype = num_slots, dtype
        self.null_slot = num_slots
        many = (num_layers, num_slots + 1)
        self._inputs = _zeros((*many, shape.kernel - 1, shape.channels), dtype, device)
        heads = (shape.num_value_heads, shape.key_dim, shape.value_dim)
        self._matrices = _zeros((*many, *heads), torch.float32, device)
        rows = max_drafts + 1 if max_drafts else 0
        self._drafts = _zeros((*many, rows, shape.channels + 2 * shape.num_value_heads), dtype, device)

    @classmethod
    def of(
        cls, model: ModelConfig, num_slots: int, max_drafts: int, dtype: torch.dtype, device: torch.device
    ) -> StateSlots | None:
        """Allocate the slots of a model, or of a rank's share of it; None for a model without recurrent layers."""
        if model.delta_net is None:
            return None
        return cls(model.num_recurrent_layers, model.delta_net, num_slots, max_drafts, dtype, device)

    def layer(self, index: int) -> LayerState:
        """Return one of the recurrent layers, counted without the others."""
        return LayerState(self._inputs[index], self._matrices[index], self._drafts[index])

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self._inputs.nbytes + self._matrices.nbytes + self._drafts.nbytes

    @property
    def state_bytes(self) -> int:
        """Bytes of a slot's state, which does not include draft tokens."""
        return self._inputs[:, 0].nbytes + self._matrices[:, 0].nbytes

    def packed(self, slot: int) -> torch.Tensor:
        """Return a copy of the state in a slot: uint8 [state_bytes]."""
        return torch.cat([part[:, slot].flatten().view(torch.uint8) for part in (self._inputs, self._matrices)])

    def unpack(self, slot: int, packed: torch.Tensor) -> None:
        """Put a packed state in a slot."""
        first = self._inputs[:, slot].nbytes
        for part, data in ((self._inputs, packed[:first]), (self._matrices, packed[first:])):
            own = part[:, slot]
            own.copy_(data.view(part.dtype).view(own.shape))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return untouched_zeros(num_bytes, "max_running or state_snapshots").view(dtype).view(shape)
