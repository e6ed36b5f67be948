"""A GGUF model's tensors in the form in which weights are loaded: views of mapped files, or places to read.

Blocks of numbers are read as bytes, uint8 [..., bytes of a row], and widened on the weights' device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from engine.base.errors import ModelLoadError
from engine.gguf.files import read_model
from engine.gguf.names import our_names
from engine.gguf.reader import GGUFTensor
from engine.gguf.types import TYPES
from engine.layers.grouped_linear import GroupedLinear, Grouping, joined
from engine.loading.gguf_blocks import GROUPINGS, coded, widened
from engine.loading.mapped_tensors import MappedFile, MappedTensor
from engine.loading.target_parts import WeightTarget
from engine.loading.tensor_groups import Expected, TensorGroup
from engine.loading.weight_streaming import Stored

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS = {kind.name: kind for kind in TYPES.values() if not kind.is_plain}


def open_gguf(path: Path) -> dict[str, MappedTensor]:
    """Map a model's files and return its tensors by their names in safetensors files. Raises ModelLoadError."""
    model = read_model(path)
    files = {each: MappedFile(each) for each in model.paths}
    return {
        name: MappedTensor(name, tensor.shape, tensor.type.name, _View(files[tensor.path], tensor))
        for name, tensor in our_names(model).items()
    }


def stored_gguf(path: Path) -> dict[str, Stored]:
    """Return the places of a model's tensors, by their names in safetensors files. Raises ModelLoadError."""
    return {
        name: Stored(tensor.path, tensor.offset, tensor.num_bytes, _dtype(tensor), _shape(tensor))
        for name, tensor in our_names(read_model(path)).items()
    }


def widening(group: TensorGroup, present: Mapping[str, MappedTensor], dtype: torch.dtype) -> TensorGroup:
    """Return the group with its blocks, if it has any, widened before they are stored.

    Matrices are widened to `dtype`, the type of the weights, so that the largest need not take twice the memory.
    """
    kinds = [
        _BLOCKS.get(present[tensor.name].dtype) if tensor.name in present else None for tensor in group.tensors
    ]
    wanted = zip(kinds, group.tensors, strict=True)
    kinds = [None if kind is None or kind.name in tensor.dtypes else kind for kind, tensor in wanted]
    if not any(kinds):
        return group

    def store(tensors: list[torch.Tensor]) -> None:
        group.store(
            [
                raw if kind is None else widened(raw, kind, dtype if raw.ndim > 1 else torch.float32)
                for raw, kind in zip(tensors, kinds, strict=True)
            ]
        )

    expected = tuple(
        tensor if kind is None else tensor._replace(dtypes=(kind.name,))
        for tensor, kind in zip(group.tensors, kinds, strict=True)
    )
    return replace(group, tensors=expected, store=store, into=None)


def kept_grouping(tensors: Mapping[str, WeightTarget], present: Mapping[str, MappedTensor]) -> Grouping | None:
    """Return the grouping in which the native kernels' memory holds a matrix of these tensors exactly; None if one
    of them is plain or changes during loading.
    """
    kinds = []
    for name, target in tensors.items():
        is_changed = target.added is not None or target.view is not None or target.is_turned
        if is_changed or not _has_all_inputs(target) or name not in present or present[name].dtype not in _BLOCKS:
            return None
        kinds.append(GROUPINGS[present[name].dtype])
    return joined(kinds)


def _has_all_inputs(target: WeightTarget) -> bool:
    """Whether a rank's part of a matrix consists of whole rows, and so of whole blocks."""
    inputs = target.shape[-1]
    return all(isinstance(own, slice) and own.indices(inputs) == (0, inputs, 1) for own in target.part[1:])


def kept_group(layer: GroupedLinear, name: str, target: WeightTarget, dtype: str) -> TensorGroup:
    """Return the group that stores a tensor of blocks as rows of a layer that keeps them."""

    def store(tensors: list[torch.Tensor]) -> None:
        found = coded(tensors[0][target.part[:1]], _BLOCKS[dtype])
        for scales in (found.scales, found.leasts):
            if scales is not None and not scales.isfinite().all():
                raise ModelLoadError(f"{name} has scales that are infinite or NaN; download the model again")
        assert isinstance(target.rows, slice)
        layer.put(target.rows, found)

    return TensorGroup((Expected(name, target.shape, (dtype,)),), store)


def _dtype(tensor: GGUFTensor) -> torch.dtype:
    return _PLAIN.get(tensor.type.name, torch.uint8)


def _shape(tensor: GGUFTensor) -> tuple[int, ...]:
    """Return the shape in which a tensor is read; for blocks, the last axis has a row's bytes."""
    if tensor.type.is_plain:
        return tensor.shape
    return *tensor.shape[:-1], tensor.shape[-1] // tensor.type.block * tensor.type.block_bytes


class _View:
    """One tensor of a mapped file, as the safetensors library offers it."""

    def __init__(self, file: MappedFile, tensor: GGUFTensor) -> None:
        self._file, self._tensor = file, tensor

    def get_tensor(self, _name: str) -> torch.Tensor:
        """Return the tensor, which is a view. Raises ModelLoadError."""
        return self._file.view(self._tensor.offset, _dtype(self._tensor), _shape(self._tensor))
