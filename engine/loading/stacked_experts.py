"""Loads experts that a file has as one tensor for each layer, and memory quantized: plain ones, which are rounded
to float8, and those in MXFP4.

    file     experts.gate_up_proj [experts, 2 inner, hidden]
    memory   apart.0.gate_up_proj, apart.1.gate_up_proj, ...   an Fp8Linear or an Mxfp4Linear each

Separate experts in files do not need this: each is a matrix like all others (`quantized_layers.py`).
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial

import torch
from torch import nn

from engine.layers.linear import Fp8Linear
from engine.layers.mxfp4_linear import Mxfp4Linear
from engine.loading.mxfp4 import packed_group
from engine.loading.target_parts import WeightTarget
from engine.loading.tensor_groups import Expected, TensorGroup
from engine.models.experts import Experts

STACKED = ("gate_up_proj", "down_proj")
"""Names in files of the tensors of all of a layer's experts."""


def quantize_stacked(model: nn.Module, parameters: Container[str], *, is_mxfp4: bool) -> None:
    """Replace plain experts that files stack by quantized ones, all on the meta device.

    `parameters`: the targets of the checkpoint's tensors. `is_mxfp4`: whether experts are stored so, not plain.
    """
    kind = Mxfp4Linear if is_mxfp4 else Fp8Linear
    for name, module in model.named_modules():
        if isinstance(module, Experts) and module.apart is not None and f"{name}.{STACKED[0]}" in parameters:
            for expert in module.apart:
                for matrix in STACKED:
                    expert.set_submodule(matrix, kind(getattr(expert, matrix)))


def stacked_group(experts: Experts, name: str, target: WeightTarget) -> TensorGroup:
    """Return the group that stores a tensor of a layer's experts, one by one those of this rank."""
    matrices = dict(zip(STACKED, experts.matrices_apart, strict=True))[target.parameter.rpartition(".")[2]]
    if isinstance(matrices[0], Mxfp4Linear):
        return packed_group(matrices, name, target)
    return TensorGroup((Expected(name, target.shape),), partial(_round, matrices, target))


def _round(matrices: list[Fp8Linear], target: WeightTarget, tensors: list[torch.Tensor]) -> None:
    held, *part = target.part
    for layer, stored in zip(matrices, tensors[0][held], strict=True):
        own = stored[tuple(part)].to(layer.weight.device)
        layer.put(slice(None), own.t() if target.is_turned else own)
