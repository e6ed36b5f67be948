"""Makes quantized layers from the tensors of a checkpoint.

    checkpoint                                    layer
    plain, `quantization: fp8`    NAME.weight             ─▶ rounded a matrix at a time ─▶ Fp8Linear.weight, .scale
    fp8, a scale for each output  NAME.weight             ─▶ as it is                   ─▶ Fp8Linear.weight
                                  NAME.weight_scale       ─▶ as it is                   ─▶ Fp8Linear.scale
    fp8 in blocks of 128 inputs   both                    ─▶ as they are                ─▶ Fp8BlockLinear
    fp8 in other blocks           both                    ─▶ rounded again, by outputs  ─▶ Fp8Linear.weight, .scale
    gptq, awq                     NAME.qweight, .qzeros, .scales ─▶ unpacked, packed our way ─▶ Int4Linear
    compressed-tensors int4       NAME.weight_packed, .weight_scale, .weight_zero_point     ─▶ likewise
    int8, nvfp4; what is no such layer   all of NAME      ─▶ widened                    ─▶ plain parameters

NAME is a projection of the checkpoint, such as model.layers.0.self_attn.q_proj; several of them are rows of one
layer. The embedding table and the output head are always plain. Latent attention's expansion is no such layer.
Blocks that projections, ranks or our order of rows would divide are also rounded again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from engine.base.errors import ModelLoadError
from engine.kernels.float8 import BLOCK_INPUTS, BLOCK_OUTPUTS
from engine.layers.linear import Fp8BlockLinear, Fp8Linear, Int4Linear, QuantizedLinear
from engine.layers.mxfp4_linear import e2m1, e2m1_pairs
from engine.loading.mapped_tensors import MappedTensor
from engine.loading.target_parts import Own, WeightTarget
from engine.loading.tensor_groups import FLOATS, Expected, TensorGroup
from engine.model_parts.formats import (
    NVFP4_INPUTS,
    Fp8Format,
    Int4Format,
    Int8Format,
    KeptFormat,
    Nvfp4Format,
    WeightFormat,
    is_ignored,
)
from engine.models.experts import Experts

MATRICES = ("qkv_proj", "qkv_a_proj", "q_b_proj", "in_proj", "o_proj", "gate_up_proj", "down_proj")
"""The layers that may be quantized."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in an int32, in units of four bits, of the outputs 0 to 7 in AWQ."""


class Matrix(NamedTuple):
    """A projection of a checkpoint, and a rank's part of it."""

    name: str
    """Its name, such as model.layers.0.self_attn.q_proj."""
    outputs: int
    inputs: int
    own_outputs: Own = slice(None)
    own_inputs: slice = slice(None)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor [outputs, inputs]."""
        return whole[self.own_outputs, self.own_inputs]


def is_stored_plain(weights: WeightFormat, name: str, present: Mapping[str, MappedTensor]) -> bool:
    """Whether a checkpoint has a matrix as plain numbers, while others are quantized.

    Its tensors (`present`) decide. Programs that write lists of such layers into config.json differ in their
    meaning, so the lists count only if there are no tensors.
    """
    if not present:
        return is_ignored(weights, name)
    if isinstance(weights, Int4Format):
        return f"{name}.weight" in present and f"{name}.{weights.codes_name}" not in present
    weight = present.get(f"{name}.weight")
    return weight is not None and weight.dtype in FLOATS


def quantize_layers(
    model: nn.Module,
    parts: Mapping[str, Mapping[str, WeightTarget]],
    weights: KeptFormat,
    is_plain: Callable[[str], bool],
) -> None:
    """Replace plain layers by quantized ones, all on the meta device. Raises ModelLoadError.

    `parts`: for each matrix of the model ("layers.0.attention.qkv_proj"), its projections by their names in the
    checkpoint. `is_plain`: whether a projection stays plain.
    """
    for name, targets in parts.items():
        projections = list(targets)
        plain = [part for part in projections if is_plain(part)]
        if name.rpartition(".")[2] not in MATRICES or len(plain) == len(projections):
            continue
        if plain:
            raise ModelLoadError(
                f"{', '.join(plain)} is not quantized, but others of {', '.join(projections)} are: Raydix "
                "computes these as one matrix, so all of them must be quantized, or none"
            )
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        has_blocks = isinstance(weights, Fp8Format) and all(
            _keeps_blocks(weights, target) for target in targets.values()
        )
        model.set_submodule(
            name, Fp8BlockLinear(layer) if has_blocks else _quantized(layer, weights, projections[0])
        )
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            _check_alike(name, module)


def _check_alike(name: str, experts: Experts) -> None:
    """Raise ModelLoadError if only some of a layer's experts are quantized: all are multiplied together."""
    for matrices in experts.matrices_apart:
        if len({type(matrix) for matrix in matrices}) > 1:
            raise ModelLoadError(
                f"only some experts of {name} are quantized: a layer's experts are multiplied together, so each "
                "projection must be quantized in all experts, or in none"
            )


def _keeps_blocks(weights: Fp8Format, target: WeightTarget) -> bool:
    """Whether a projection's scales can stay unchanged: its part has whole blocks of inputs, and whole groups of
    outputs that share a scale in memory.
    """
    if weights.kept_block is None or not isinstance(target.rows, slice):
        return False
    if (target.rows.start or 0) % BLOCK_OUTPUTS or (target.rows.stop or 0) % BLOCK_OUTPUTS:
        return False
    own_parts = (*target.part, slice(None), slice(None))[:2]
    for own, size, unit in zip(own_parts, target.shape, (BLOCK_OUTPUTS, BLOCK_INPUTS), strict=True):
        if not isinstance(own, slice) or size % unit or any(bound % unit for bound in own.indices(size)[:2]):
            return False
    return True


def _quantized(layer: nn.Linear, weights: KeptFormat, part: str) -> QuantizedLinear:
    if isinstance(weights, Fp8Format):
        return Fp8Linear(layer)
    group = weights.group(layer.in_features)
    if layer.in_features % group or group % 32 or layer.out_features % 8:
        raise ModelLoadError(
            f"{part} has {layer.in_features} inputs (on each rank), and config.json has groups of {group}: "
            "expected whole groups, of a multiple of 32; with several ranks, lower tensor_parallel_size"
        )
    return Int4Linear(layer, group)


def tensor_groups(
    layer: QuantizedLinear, rows: slice, matrix: Matrix, weights: WeightFormat | None, present: Container[str]
) -> Iterator[TensorGroup]:
    """Yield the groups of tensors that become `rows` of a rank's layer.

    `weights`: how the matrix is stored; None for plain numbers. `present`: names of the checkpoint's tensors.
    """
    name, outputs, inputs = matrix.name, matrix.outputs, matrix.inputs
    if isinstance(layer, Int4Linear):
        assert isinstance(weights, Int4Format)
        yield _int4_group(layer, rows, matrix, weights)
        if weights.method == "gptq":
            yield from _gptq_extras(layer.bias is not None, matrix, weights.group(inputs), present)
        return
    if isinstance(layer, Fp8BlockLinear):
        assert isinstance(weights, Fp8Format)
        weight = Expected(f"{name}.weight", (outputs, inputs), ("F8_E4M3",))
        yield TensorGroup((weight,), partial(_copy, layer, rows, matrix), lambda: layer.weight[rows])
        scales = _scales(matrix, weights, present)
        yield TensorGroup((scales,), partial(_copy_block_scales, layer, rows, matrix, weights))
        return
    assert isinstance(layer, Fp8Linear)
    if weights is None:
        yield TensorGroup((Expected(f"{name}.weight", (outputs, inputs)),), partial(_round, layer, rows, matrix))
    else:
        assert isinstance(weights, Fp8Format)
        weight = Expected(f"{name}.weight", (outputs, inputs), ("F8_E4M3",))
        if weights.block is None:
            yield TensorGroup((weight,), partial(_copy, layer, rows, matrix), lambda: layer.weight[rows])
            yield TensorGroup((_scales(matrix, weights, present),), partial(_copy_scale, layer, rows, matrix))
        else:
            store = partial(_round_blocks, layer, rows, matrix, weights.block)
            yield TensorGroup((weight, _scales(matrix, weights, present)), store)


def widened_group(
    matrix: Matrix, weights: WeightFormat, present: Container[str], store: Callable[[list[torch.Tensor]], None]
) -> TensorGroup | None:
    """Return the tensors of a quantized matrix, which is widened to float32 as a whole and passed to `store`; None
    if the checkpoint has it as plain numbers.
    """
    if isinstance(weights, Int4Format):
        tensors = _int4_tensors(matrix, weights)

        def widen(stored: list[torch.Tensor]) -> torch.Tensor:
            codes, scales, zeros = _unpacked(weights, stored)
            group = weights.group(matrix.inputs)
            differences = codes.float().unflatten(1, (-1, group)) - zeros.t()[..., None]
            widened: torch.Tensor = (differences * scales.t()[..., None]).flatten(1)
            return widened
    elif isinstance(weights, Nvfp4Format):
        tensors = _nvfp4_tensors(matrix)
        widen = _widened_nvfp4
    else:
        dtype = "I8" if isinstance(weights, Int8Format) else "F8_E4M3"
        weight = Expected(f"{matrix.name}.weight", (matrix.outputs, matrix.inputs), (dtype,))
        tensors = [weight, _scales(matrix, weights, present)]

        def widen(stored: list[torch.Tensor]) -> torch.Tensor:
            return _widened(stored[0], stored[1], weights.block if isinstance(weights, Fp8Format) else None)

    if not any(scales.name in present for scales in tensors[1:]):
        return None
    return TensorGroup(tuple(tensors), lambda stored: store([widen(stored)]))


def _scales(matrix: Matrix, weights: Fp8Format | Int8Format, present: Container[str]) -> Expected:
    """Return a checkpoint's scales of a matrix of eight bits."""
    outputs, inputs = matrix.outputs, matrix.inputs
    names = [f"{matrix.name}.{each}" for each in weights.scale_names]
    name = next((each for each in names if each in present), names[0])
    if isinstance(weights, Int8Format) or weights.block is None:
        return Expected(name, (outputs,), FLOATS, ((outputs, 1), (1,), (1, 1), ()))
    height, width = weights.block
    return Expected(name, (-(-outputs // height), -(-inputs // width)))


def _widened(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """Return float32 [outputs, inputs]."""
    outputs, inputs = weight.shape
    scales = scales.float()
    if block is None:
        return weight.float().mul_(scales.reshape(-1, 1))
    for axis, size in enumerate(block):
        scales = scales.repeat_interleave(size, axis)
    return weight.float().mul_(scales[:outputs, :inputs])


def _nvfp4_tensors(matrix: Matrix) -> list[Expected]:
    """Return the tensors of a matrix in NVFP4: codes, scales of groups of inputs, the scale of all."""
    name, outputs, inputs = matrix.name, matrix.outputs, matrix.inputs
    return [
        Expected(f"{name}.weight_packed", (outputs, inputs // 2), ("U8",)),
        Expected(f"{name}.weight_scale", (outputs, inputs // NVFP4_INPUTS), ("F8_E4M3",)),
        Expected(f"{name}.weight_global_scale", (1,), ("F32",), ((),)),
    ]


def _widened_nvfp4(stored: list[torch.Tensor]) -> torch.Tensor:
    """Return float32 [outputs, inputs]. The scale of all divides, as in compressed-tensors."""
    pairs, scales, divisor = stored
    numbers = e2m1(e2m1_pairs(pairs)).unflatten(1, (-1, NVFP4_INPUTS))
    widened: torch.Tensor = numbers * (scales.float() / divisor)[..., None]
    return widened.flatten(1)


def _round(layer: Fp8Linear, rows: slice, matrix: Matrix, tensors: list[torch.Tensor]) -> None:
    layer.put(rows, matrix.of(tensors[0]).to(layer.weight.device))


def _copy(layer: Fp8Linear | Fp8BlockLinear, rows: slice, matrix: Matrix, tensors: list[torch.Tensor]) -> None:
    layer.weight[rows] = matrix.of(tensors[0])


def _copy_scale(layer: Fp8Linear, rows: slice, matrix: Matrix, tensors: list[torch.Tensor]) -> None:
    layer.scale[rows] = tensors[0].to(layer.scale).view(-1).expand(matrix.outputs)[matrix.own_outputs]


def _copy_block_scales(
    layer: Fp8BlockLinear, rows: slice, matrix: Matrix, weights: Fp8Format, tensors: list[torch.Tensor]
) -> None:
    assert weights.block is not None and isinstance(matrix.own_outputs, slice)
    scales = tensors[0].to(layer.scale).repeat_interleave(weights.block[0] // BLOCK_OUTPUTS, 0)
    first, end, _ = matrix.own_outputs.indices(matrix.outputs)
    first_input, end_input, _ = matrix.own_inputs.indices(matrix.inputs)
    begin, stop, _ = rows.indices(layer.out_features)
    layer.scale[begin // BLOCK_OUTPUTS : stop // BLOCK_OUTPUTS] = scales[
        first // BLOCK_OUTPUTS : end // BLOCK_OUTPUTS, first_input // BLOCK_INPUTS : end_input // BLOCK_INPUTS
    ]


def _round_blocks(
    layer: Fp8Linear, rows: slice, matrix: Matrix, block: tuple[int, int], tensors: list[torch.Tensor]
) -> None:
    weight, scales = (tensor.to(layer.weight.device) for tensor in tensors)
    layer.put(rows, matrix.of(_widened(weight, scales, block)))


def _int4_group(layer: Int4Linear, rows: slice, matrix: Matrix, weights: Int4Format) -> TensorGroup:
    return TensorGroup(tuple(_int4_tensors(matrix, weights)), partial(_unpack, layer, rows, matrix, weights))


def _int4_tensors(matrix: Matrix, weights: Int4Format) -> list[Expected]:
    """Return the tensors of a matrix of four bits: codes, zero points if there are any, scales."""
    name, outputs, inputs = matrix.name, matrix.outputs, matrix.inputs
    groups = inputs // weights.group(inputs)
    if weights.method == "compressed-tensors":
        zeros = Expected(f"{name}.weight_zero_point", (outputs // 8, groups), ("I32",))
        return [
            Expected(f"{name}.{weights.codes_name}", (outputs, inputs // 8), ("I32",)),
            *([] if weights.is_symmetric else [zeros]),
            Expected(f"{name}.weight_scale", (outputs, groups)),
        ]
    codes = (inputs // 8, outputs) if weights.method == "gptq" else (inputs, outputs // 8)
    return [
        Expected(f"{name}.{weights.codes_name}", codes, ("I32",)),
        Expected(f"{name}.qzeros", (groups, outputs // 8), ("I32",)),
        Expected(f"{name}.scales", (groups, outputs)),
    ]


def _unpack(
    layer: Int4Linear, rows: slice, matrix: Matrix, weights: Int4Format, tensors: list[torch.Tensor]
) -> None:
    codes, scales, zeros = _unpacked(weights, [tensor.to(layer.packed.device) for tensor in tensors])
    first, end, _ = matrix.own_inputs.indices(matrix.inputs)
    group = weights.group(matrix.inputs)
    own = slice(first // group, -(-end // group)), matrix.own_outputs
    layer.put(rows, matrix.of(codes), scales[own], zeros[own])


def _unpacked(weights: Int4Format, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [outputs, inputs], and scales and zero points [groups, outputs] of each group of inputs."""
    packed, *others = tensors
    if weights.method == "compressed-tensors":  # codes and zero points are stored plus 8
        codes, scales = _nibbles(packed, range(8)), others[-1].t()
        zeros = torch.full_like(scales, 8, dtype=torch.uint8)
        return codes, scales, zeros if weights.is_symmetric else _nibbles(others[0].t(), range(8))
    packed_zeros, scales = others
    if weights.method == "gptq":
        codes = _nibbles(packed.t(), range(8))  # an int32 holds eight inputs of an output
        zeros = _nibbles(packed_zeros, range(8)) + weights.zero_offset
    else:
        codes = _nibbles(packed, _AWQ_ORDER).t().contiguous()  # eight outputs of an input
        zeros = _nibbles(packed_zeros, _AWQ_ORDER)
    return codes, scales, torch.full_like(zeros, 8) if weights.is_symmetric else zeros


def _nibbles(packed: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Unpack int32 [R, C] to uint8 [R, 8 C]: number i of each int32 is its four bits at 4 * order[i]."""
    return torch.stack([((packed >> 4 * place) & 15).to(torch.uint8) for place in order], -1).flatten(1)


def _gptq_extras(is_biased: bool, matrix: Matrix, group: int, present: Container[str]) -> Iterator[TensorGroup]:
    """Yield needless tensors of GPTQ's writers; storing them only checks that they change nothing."""
    if f"{matrix.name}.g_idx" in present:
        index = Expected(f"{matrix.name}.g_idx", (matrix.inputs,), ("I32", "I64"))
        yield TensorGroup((index,), partial(_check_group_index, index.name, group))
    if not is_biased and f"{matrix.name}.bias" in present:
        bias = Expected(f"{matrix.name}.bias", (matrix.outputs,))
        yield TensorGroup((bias,), partial(_check_no_bias, bias.name))


def _check_group_index(name: str, group: int, tensors: list[torch.Tensor]) -> None:
    index = tensors[0].cpu().long()
    if not torch.equal(index, torch.arange(len(index)) // group):
        raise ModelLoadError(
            f"{name} puts inputs into groups in another order than their own (activation order), which is not "
            f"supported: expected input i in group i / {group}; use a version made with desc_act: false"
        )


def _check_no_bias(name: str, tensors: list[torch.Tensor]) -> None:
    if tensors[0].any():
        raise ModelLoadError(
            f"{name} is not zero, but by config.json this layer has no bias: config.json and weights do not "
            "belong together"
        )
