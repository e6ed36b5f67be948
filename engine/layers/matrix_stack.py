"""The matrices of a layer's experts, consecutive in memory, so that one kernel can address all of them.

    weight [ expert 0 | expert 1 | expert 2 | ... ]        layers[1].weight is a view of the second part,
    scale  [ expert 0 | expert 1 | expert 2 | ... ]        layers[1].scale too

Each expert's matrix is also a layer: it loads its own part, and computes if there is no kernel for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from engine.layers.linear import BufferShape, QuantizedLinear


class MatrixStack:
    """Linear layers of one kind and shape, without biases; weights of one name share one tensor."""

    def __init__(
        self, layers: Sequence[nn.Linear | QuantizedLinear], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the layers' weights, uninitialized. `dtype`: that of plain weights."""
        self.layers = tuple(layers)
        self.tensors: dict[str, torch.Tensor] = {}
        """Weights, scales and zero points by their names in the layers: [layers, ...] each."""
        for name, (shape, kind) in _buffers(self.layers[0], dtype).items():
            whole = self.tensors[name] = torch.empty(len(self.layers), *shape, dtype=kind, device=device)
            for layer, own in zip(self.layers, whole, strict=True):
                if isinstance(layer, QuantizedLinear):
                    layer.register_buffer(name, own)
                else:
                    layer.weight = nn.Parameter(own, requires_grad=False)

    def __len__(self) -> int:
        return len(self.layers)


def _buffers(layer: nn.Linear | QuantizedLinear, dtype: torch.dtype) -> dict[str, BufferShape]:
    if isinstance(layer, QuantizedLinear):
        return layer.buffers_needed
    return {"weight": BufferShape((layer.out_features, layer.in_features), dtype)}
