"""Loads weights from files directly into the decoder's fused parameters (`engine/loading/targets.py`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from engine.kernels import native
from engine.layers.grouped_linear import GroupedLinear
from engine.layers.linear import QuantizedLinear
from engine.loading.checkpoint import open_checkpoint, stored_checkpoint
from engine.loading.contents import check_decoder_tensors
from engine.loading.gguf_tensors import kept_group, kept_grouping, widening
from engine.loading.mapped_tensors import MappedTensor, release
from engine.loading.mtp_targets import is_of_mtp
from engine.loading.mxfp4 import widened_group as widened_mxfp4
from engine.loading.quantized_layers import Matrix, is_stored_plain, quantize_layers, widened_group
from engine.loading.quantized_layers import tensor_groups as quantized_groups
from engine.loading.stacked_experts import STACKED, quantize_stacked, stacked_group
from engine.loading.stage_decoder import keep_own, leave_out_others, own_targets
from engine.loading.target_parts import WeightTarget
from engine.loading.targets import HEAD, weight_targets
from engine.loading.tensor_groups import Expected, TensorGroup
from engine.loading.unused import Unused
from engine.loading.weight_streaming import stream_groups
from engine.model_config.config import ModelConfig
from engine.model_parts.formats import Fp8Format, KeptFormat, Nvfp4Format, WeightFormat
from engine.models.decoder import Decoder
from engine.models.experts import Experts
from engine.parallel.collective import ALONE, Collective
from engine.parallel.stage import WHOLE, Stage

logger = logging.getLogger(__name__)


def load_decoder(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    input_major: bool = False,
    fp8: bool = False,
    ranks: Collective = ALONE,
    needs_head: bool = True,
    keeps_blocks: bool = False,
    uses_mtp: bool = False,
) -> Decoder:
    """Load this rank's share of the model `config`. All names, shapes and types are checked before memory is
    allocated.

    A model that only embeds may have been saved without its output head, which is then not needed: its logits have
    no meaning.

    With `input_major`, linear weights [out, in] get the strides (1, out), with which a CPU multiplies few rows (a
    batch of decodes) up to twice as fast. With `fp8`, the layers' matrices are rounded one by one as they are
    read. With `keeps_blocks`, matrices in GGUF's blocks become `GroupedLinear`, which only the native kernels
    compute, instead of widened ones. `uses_mtp`: whether the MTP layer is loaded by itself (`load_mtp`).
    Raises ModelLoadError.
    """
    with ExitStack() as stack:
        tensors = open_checkpoint(directory, stack)
        config = with_head(config, tensors, is_needed=needs_head)
        config, stored = (config.rounded(), Fp8Format()) if fp8 else (config, config.weight_format)
        decoder, targets, groups = plan_loading(config, ranks, tensors, stored, dtype, keeps_blocks)
        unused = check_decoder_tensors(tensors, [tensor for group in groups for tensor in group.tensors], config)
        if uses_mtp:
            unused = [name for name in unused if not is_of_mtp(config, name)]
        if ranks.rank == 0:
            Unused.of(directory, config.unused_keys, unused).log(directory)
            if isinstance(stored, Nvfp4Format) and stored.rounds_activations:
                logger.warning(
                    "%s was quantized for activations in NVFP4 (quantization_config.input_activations); here they "
                    "stay in %s, so answers differ from those of engines that round them",
                    directory,
                    str(dtype).removeprefix("torch."),
                )
        if ranks.stage.count > 1:
            targets = own_targets(decoder, ranks.stage, targets)
            groups = _widened_groups(decoder, targets, config, tensors, dtype)
            leave_out_others(decoder, ranks.stage)
        # Parts that only other ranks have stay zero: a bias, rows after the last token's.
        new = torch.empty if ranks.shard.size == 1 else torch.zeros
        allocate(decoder, partial(new, device=device), dtype, wide_parameters(targets), input_major)
        # Experts that only other ranks have are not read.
        groups = [group for group in groups if group.into is None or group.into().numel()]
        read_groups(directory, tensors, groups, device)
    if ranks.stage.count > 1:
        keep_own(decoder, ranks.stage)
    return decoder.eval()


def wide_parameters(targets: Mapping[str, WeightTarget]) -> set[str]:
    """Return the names of the parameters that are float32, whatever the model's type."""
    return {target.parameter for target in targets.values() if target.added is not None}


@torch.no_grad()
def read_groups(
    directory: Path, tensors: Mapping[str, MappedTensor], groups: Sequence[TensorGroup], device: torch.device
) -> None:
    """Read and store all groups; `tensors` are those of the checkpoint."""
    if device.type == "cuda":
        stream_groups(stored_checkpoint(directory), groups, device)
    else:
        copy_groups(tensors, groups)


def unused_tensors(directory: Path, config: ModelConfig, *, needs_head: bool = False) -> list[str]:
    """Implement `unused_tensors.unused_tensors` for every model."""
    with ExitStack() as stack:
        tensors = open_checkpoint(directory, stack)
        config = with_head(config, tensors, is_needed=needs_head)
        _, _, groups = plan_loading(config, ALONE, tensors, config.weight_format)
        return check_decoder_tensors(tensors, [tensor for group in groups for tensor in group.tensors], config)


class KeptBlocks(NamedTuple):
    """The blocks of a model in GGUF that the native kernels' memory keeps unchanged."""

    tensors: frozenset[str]
    """Names of the tensors in safetensors files."""
    num_numbers: int
    num_bytes: int
    """Bytes of the kept blocks in memory."""


def kept_blocks(directory: Path, config: ModelConfig, stage: Stage = WHOLE) -> KeptBlocks:
    """Return the blocks that `load_decoder` keeps (`keeps_blocks`) on a stage. Reads only headers.

    Raises ModelLoadError.
    """
    with ExitStack() as stack:
        present = open_checkpoint(directory, stack)
        config = with_head(config, present, is_needed=False)
        decoder, targets, _ = plan_loading(config, ALONE, present, config.weight_format, keeps_blocks=True)
        layers = {
            name: each
            for name, each in decoder.named_modules()
            if isinstance(each, GroupedLinear) and stage.has(name, config.num_layers)
        }
        kept = (name for name, target in targets.items() if target.parameter.removesuffix(".weight") in layers)
        return KeptBlocks(
            frozenset(name for name in kept if name.endswith(".weight")),
            sum(layer.in_features * layer.out_features for layer in layers.values()),
            sum(layer.packed_bytes for layer in layers.values()),
        )


def with_head(config: ModelConfig, tensors: Mapping[str, MappedTensor], *, is_needed: bool) -> ModelConfig:
    """Return the model with the checkpoint's output head, which may be another than config.json says.

    A head that differs from the embedding table is not tied to it, as in transformers. A head that is not needed
    may be missing.
    """
    head = next((tensors[name] for name in tensors if name.endswith(HEAD)), None)
    if head is None:
        return config if is_needed else replace(config, tied_embeddings=True)
    table = next((tensors[name] for name in tensors if name.endswith("embed_tokens.weight")), None)
    if not config.tied_embeddings or table is None or _are_equal(head, table):
        return config
    logger.warning(
        "tie_word_embeddings is true, but %s differs from %s, so the model has a separate output head",
        head.name,
        table.name,
    )
    return replace(config, tied_embeddings=False)


def _are_equal(one: MappedTensor, other: MappedTensor) -> bool:
    stored = one.read(), other.read()
    are_equal = one.shape == other.shape and torch.equal(*stored)
    for tensor in stored:
        release(tensor)
    return are_equal


def plan_loading(
    config: ModelConfig,
    ranks: Collective,
    present: Mapping[str, MappedTensor],
    stored: WeightFormat | None,
    dtype: torch.dtype = torch.float32,
    keeps_blocks: bool = False,
) -> tuple[Decoder, dict[str, WeightTarget], list[TensorGroup]]:
    """Return this rank's share of a model on the meta device, and how each tensor of the checkpoint is loaded into
    it.

    `present`: the checkpoint's tensors, none for random numbers; `stored`: the format of matrices in memory;
    `dtype`: the type of the weights; `keeps_blocks` as for `load_decoder`. Raises ModelLoadError.
    """
    targets = weight_targets(config, ranks.shard, present)
    with torch.device("meta"):
        decoder = Decoder(ranks.shard.of(config), ranks)
    return decoder, targets, plan_groups(decoder, targets, config, present, stored, dtype, keeps_blocks)


def plan_groups(
    decoder: Decoder,
    targets: Mapping[str, WeightTarget],
    config: ModelConfig,
    present: Mapping[str, MappedTensor],
    stored: WeightFormat | None,
    dtype: torch.dtype,
    keeps_blocks: bool = False,
) -> list[TensorGroup]:
    """Return how the tensors of `targets` are loaded into a decoder on the meta device, some of whose layers are
    replaced by quantized ones. The arguments are those of `plan_loading`.
    """
    with torch.device("meta"):
        if isinstance(stored, KeptFormat):
            quantize_layers(decoder, _parts(targets), stored, partial(_is_plain, config.weight_format, present))
        is_mxfp4 = config.experts is not None and config.experts.is_mxfp4
        quantize_stacked(decoder, {target.parameter for target in targets.values()}, is_mxfp4=is_mxfp4)
        if keeps_blocks:
            _keep_blocks(decoder, targets, present)
    return _widened_groups(decoder, targets, config, present, dtype)


def _widened_groups(
    decoder: Decoder,
    targets: Mapping[str, WeightTarget],
    config: ModelConfig,
    present: Mapping[str, MappedTensor],
    dtype: torch.dtype,
) -> list[TensorGroup]:
    """Return the groups of the tensors of `targets`, which widen blocks that are not kept."""
    return [widening(group, present, dtype) for group in _groups(decoder, targets, config, present)]


def _keep_blocks(
    decoder: Decoder, targets: Mapping[str, WeightTarget], present: Mapping[str, MappedTensor]
) -> None:
    """Replace matrices and tables whose tensors are all blocks by layers that keep them."""
    for module, projections in _parts(targets).items():
        tensors = {f"{name}.weight": target for name, target in projections.items()}
        if (grouping := kept_grouping(tensors, present)) is None:
            continue
        plain = decoder.get_submodule(module)
        if isinstance(plain, torch.nn.Embedding):
            plain = torch.nn.Linear(plain.embedding_dim, plain.num_embeddings, bias=False)
        if isinstance(plain, torch.nn.Linear):
            decoder.set_submodule(module, GroupedLinear(plain, grouping))


def _is_plain(weights: WeightFormat | None, present: Mapping[str, MappedTensor], name: str) -> bool:
    """Whether a matrix stays plain while others are quantized; `weights` is None if loading rounds all."""
    return weights is not None and is_stored_plain(weights, name, present)


def copy_groups(tensors: Mapping[str, MappedTensor], groups: Sequence[TensorGroup]) -> None:
    """Store all groups on a CPU, and release each tensor of the files afterwards."""
    for group in groups:
        stored = [tensors[expected.name].read() for expected in group.tensors]
        group.store(stored)
        for tensor in stored:
            release(tensor)


def _parts(targets: Mapping[str, WeightTarget]) -> dict[str, dict[str, WeightTarget]]:
    """Return the tensors that become rows of each decoder module with a weight, by their names."""
    parts: dict[str, dict[str, WeightTarget]] = {}
    for name, target in targets.items():
        if target.parameter.endswith(".weight") and target.rows != slice(0):
            parts.setdefault(target.parameter.removesuffix(".weight"), {})[name.removesuffix(".weight")] = target
    return parts


def _groups(
    decoder: Decoder, targets: Mapping[str, WeightTarget], config: ModelConfig, present: Mapping[str, MappedTensor]
) -> Iterator[TensorGroup]:
    """Yield the groups of all tensors of the decoder, whose parameters may still be on the meta device."""
    modules = dict(decoder.named_modules())
    for name, target in targets.items():
        module, _, attribute = target.parameter.rpartition(".")
        layer = modules[module]
        if isinstance(layer, GroupedLinear) and attribute == "weight":
            yield kept_group(layer, name, target, present[name].dtype)
        elif isinstance(layer, QuantizedLinear) and attribute == "weight":
            assert isinstance(target.rows, slice)
            outputs, inputs = target.shape
            own_outputs, own_inputs = (*target.part, slice(None), slice(None))[:2]
            assert isinstance(own_inputs, slice)
            matrix = Matrix(name.removesuffix(".weight"), outputs, inputs, own_outputs, own_inputs)
            stored = config.weight_format if isinstance(config.weight_format, KeptFormat) else None
            groups = quantized_groups(layer, target.rows, matrix, stored, present)
            yield from map(_unread, groups) if target.rows == slice(0) else groups
        elif isinstance(layer, Experts) and layer.apart is not None and attribute in STACKED:
            yield stacked_group(layer, name, target)
        else:
            into = partial(_rows, layer, attribute, target.rows)
            if config.experts is not None and config.experts.is_mxfp4 and target.is_turned:
                yield widened_mxfp4(name, target, into)
                continue
            if config.weight_format is not None and len(target.shape) == 2:
                matrix = Matrix(name.removesuffix(".weight"), *target.shape)
                store = partial(_store, into, target)
                if (widened := widened_group(matrix, config.weight_format, present, store)) is not None:
                    yield widened if into().numel() else _unread(widened)
                    continue
            is_kept = target.added is None and target.view is None and not (target.is_turned or _is_picked(target))
            store = partial(_store, into, target)
            yield TensorGroup((Expected(name, target.shape),), store, into if is_kept else None)


def _unread(group: TensorGroup) -> TensorGroup:
    """Return the group for another rank's tensors: they are checked, and take no memory here."""
    return replace(group, into=lambda: torch.empty(0))


def _rows(module: torch.nn.Module, attribute: str, rows: slice | tuple[int, slice]) -> torch.Tensor:
    return module.get_parameter(attribute).detach()[rows]


def _is_picked(target: WeightTarget) -> bool:
    """Whether this rank's part of a tensor is selected row by row."""
    return any(isinstance(rows, np.ndarray) for rows in target.part)


def _store(into: Callable[[], torch.Tensor], target: WeightTarget, tensors: list[torch.Tensor]) -> None:
    own = tensors[0][target.part]
    if target.view is not None:
        own = own.reshape(target.view)
    if target.is_turned:
        own = own.transpose(-1, -2)
    into().copy_(own if target.added is None else own.float() + target.added)


def prefers_input_major(dtype: torch.dtype) -> bool:
    """Whether a CPU multiplies weights of `dtype` faster with `input_major`. Without instructions for bfloat16,
    torch multiplies numbers of 16 bits in this layout one by one, tens of times more slowly.
    """
    if dtype != torch.bfloat16:
        return dtype == torch.float32
    try:
        return native.kernels(dtype).isa in ("avx512_bf16", "amx")
    except native.NativeUnavailable:
        return False


def allocate(
    model: torch.nn.Module,
    new: partial[torch.Tensor],
    dtype: torch.dtype,
    wide: Container[str] = (),
    input_major: bool = False,
) -> None:
    """Allocate memory for each parameter of a model on the meta device; `new` makes it from the shape. Those named
    in `wide` are float32. Quantized layers allocate their own, a layer's experts together.

    `Module.to_empty` does nearly the same, but imports torch's compiler.
    """
    for module in model.modules():
        if isinstance(module, Experts) and module.apart is not None:
            module.allocate(dtype, new.keywords["device"])
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue  # an expert's, in memory that all experts share
            is_turned = input_major and isinstance(module, torch.nn.Linear) and parameter.ndim == 2
            shape = parameter.shape[::-1] if is_turned else parameter.shape
            empty = new(shape, dtype=torch.float32 if f"{path}.{name}" in wide else dtype)
            setattr(module, name, torch.nn.Parameter(empty.t() if is_turned else empty, requires_grad=False))
        if isinstance(module, QuantizedLinear) and not list(module.buffers()):
            module.allocate(new.keywords["device"])
