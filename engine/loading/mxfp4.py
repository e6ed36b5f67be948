"""Loads experts in MXFP4 (`engine/layers/mxfp4_linear.py`): packed, or widened for CPUs.

NAME_blocks  uint8 [experts, outputs, inputs / 32, 16]   two numbers a byte, the first in the low bits
NAME_scales  uint8 [experts, outputs, inputs / 32]       exponents, plus 127
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch

from engine.layers.mxfp4_linear import Mxfp4Linear, e2m1, e2m1_pairs, e8m0
from engine.loading.target_parts import WeightTarget
from engine.loading.tensor_groups import Expected, TensorGroup
from engine.model_parts.formats import MXFP4_INPUTS

Store = Callable[[Iterable[tuple[torch.Tensor, torch.Tensor]]], None]
"""Stores the codes [outputs, inputs] and the exponents [outputs, inputs / 32] of each of this rank's experts."""


def packed_group(layers: list[Mxfp4Linear], name: str, target: WeightTarget) -> TensorGroup:
    """Return the tensors of a stack of experts that stay packed. `target` is that of plain numbers, [E, inputs,
    outputs]; its part has whole blocks of inputs.
    """
    return _group(name, target, partial(_pack, layers, target))


def widened_group(name: str, target: WeightTarget, into: Callable[[], torch.Tensor]) -> TensorGroup:
    """Return the same tensors, widened into plain parameters [E, outputs, inputs]."""
    return _group(name, target, partial(_widen, into, target))


def _group(name: str, target: WeightTarget, store: Store) -> TensorGroup:
    count, inputs, outputs = target.shape
    blocks = Expected(f"{name}_blocks", (count, outputs, inputs // MXFP4_INPUTS, MXFP4_INPUTS // 2), ("U8",))
    scales = Expected(f"{name}_scales", (count, outputs, inputs // MXFP4_INPUTS), ("U8",))
    held = range(count)[target.part[0]] if isinstance(target.part[0], slice) else target.part[0].tolist()

    def store_held(tensors: list[torch.Tensor]) -> None:
        store((e2m1_pairs(tensors[0][expert]).flatten(1), tensors[1][expert]) for expert in held)

    return TensorGroup((blocks, scales), store_held)


def _pack(
    layers: list[Mxfp4Linear], target: WeightTarget, experts: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    inputs, outputs = (*target.part[1:], slice(None))[:2]
    blocks = np.arange(target.shape[1])[inputs][::MXFP4_INPUTS] // MXFP4_INPUTS
    for layer, (codes, exponents) in zip(layers, experts, strict=True):
        layer.put(codes[outputs][:, inputs], exponents[outputs][:, blocks])


def _widen(
    into: Callable[[], torch.Tensor],
    target: WeightTarget,
    experts: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Widen expert by expert, so that memory holds only one of them twice."""
    for own, (codes, exponents) in zip(into(), experts, strict=True):
        numbers = e2m1(codes).unflatten(1, (-1, MXFP4_INPUTS)) * e8m0(exponents)[..., None]
        own.copy_(numbers.flatten(1).t()[tuple(target.part[1:])].t())
