"""Tiny checkpoints as quantizers write them, packed here number by number from the formats' description.

Each maker turns a plain checkpoint into a quantized one and saves beside it, in `plain/`, the model of the
numbers that the quantized ones stand for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from tests.engine.support.oracle import save_tiny

GROUP = 32
LINEAR = re.compile(
    r"model\.layers\.\d+\.(self_attn|mlp|block_sparse_moe|linear_attn)"
    r"\.([\w.]+_proj(_with_mqa|_qkvz?|_z)?|experts\.\d+\.w[123])\.weight"
)
"""Names of the matrices that quantizers quantize."""
Tensors = dict[str, torch.Tensor]


class Checkpoint(NamedTuple):
    quantized: Path
    plain: Path
    """The same weights as float32."""


def rewrite(directory: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def configure(directory: Path, **changes: Any) -> None:
    """Change fields of config.json's quantization_config."""
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {**config.get("quantization_config", {}), **changes}
    (directory / "config.json").write_text(json.dumps(config))


def make(
    directory: Path,
    quantize: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]],
    config: dict[str, Any],
    family: str = "qwen3",
    **overrides: Any,
) -> Checkpoint:
    """`quantize` takes a matrix's name, without ".weight", and the matrix; it gives the tensors that stand for it,
    and what they stand for."""
    paths = directory / "quantized", directory / "plain"
    made = Checkpoint(*(save_tiny(family, path, **overrides) for path in paths))
    stored: Tensors = {}
    plain: Tensors = {}
    for name, tensor in load_file(made.plain / "model.safetensors").items():
        if LINEAR.fullmatch(name):
            tensors, plain[name] = quantize(name.removesuffix(".weight"), tensor)
            stored |= tensors
        else:
            stored[name] = plain[name] = tensor
    save_file(stored, made.quantized / "model.safetensors")
    save_file(plain, made.plain / "model.safetensors", metadata={"format": "pt"})
    configure(made.quantized, **config)
    return made


# --- fp8 -----------------------------------------------------------------------------------------------------


def fp8_config(strategy: str = "channel", **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **changes,
    }


def fp8_channels(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (matrix.abs().amax(1, keepdim=True) / 448).bfloat16().float()
    rounded = (matrix / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {f"{name}.weight": rounded, f"{name}.weight_scale": scale.bfloat16()}, rounded.float() * scale


def fp8_tensor(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale for all, and one for activations, as static quantization writes it."""
    scale = matrix.abs().max() / 448
    rounded = (matrix / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": rounded, "weight_scale": scale.view(1), "input_scale": torch.tensor([0.02])}
    return {f"{name}.{key}": value for key, value in tensors.items()}, rounded.float() * scale


def fp8_of_transformers(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The same by the names under which transformers saves it."""
    tensors, meant = fp8_tensor(name, matrix)
    weight, scale = (tensors[f"{name}.{key}"] for key in ("weight", "weight_scale"))
    renamed = {"weight": weight, "weight_scale_inv": scale.view(()), "activation_scale": torch.tensor(0.02)}
    return {f"{name}.{key}": value for key, value in renamed.items()}, meant


FP8_OF_TRANSFORMERS = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


def fp8_blocks(name: str, matrix: torch.Tensor, size: int = 64) -> tuple[Tensors, torch.Tensor]:
    """A scale for 64 x 64 weights: the tiny model's matrices then have blocks that are cut off."""
    outputs, inputs = matrix.shape
    scales = torch.empty(-(-outputs // size), -(-inputs // size))
    rounded, meant = torch.empty_like(matrix, dtype=torch.float8_e4m3fn), torch.empty_like(matrix)
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            area = slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size)
            scales[row, column] = matrix[area].abs().max() / 448
            rounded[area] = (matrix[area] / scales[row, column]).to(torch.float8_e4m3fn)
            meant[area] = rounded[area].float() * scales[row, column]
    return {f"{name}.weight": rounded, f"{name}.weight_scale_inv": scales}, meant


FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [64, 64],
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
}


# --- four bits -----------------------------------------------------------------------------------------------


def _int4(matrix: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [in, out] of 0..15, scales and zero points [in / GROUP, out], and the matrix they stand for."""
    outputs, inputs = matrix.shape
    groups = matrix.view(outputs, inputs // GROUP, GROUP)
    if symmetric:
        scale = (groups.abs().amax(2) / 7).half().float()
        zero = torch.full_like(scale, 8)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale = ((high - low) / 15).half().float()
        zero = (-low / scale).round().clamp(1, 15)  # from 1: the first format stores one less
    codes = (groups / scale[:, :, None] + zero[:, :, None]).round().clamp(0, 15)
    meant = ((codes - zero[:, :, None]) * scale[:, :, None]).view(outputs, inputs)
    return codes.view(outputs, inputs).t().int(), scale.t().contiguous(), zero.t().int(), meant


def _words(numbers: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> torch.Tensor:
    """Eight neighbours of [rows, columns] of four bits as an int32: bits 4 i .. 4 i + 3 are number order[i]."""
    eights = (numbers.long() & 15).unflatten(1, (-1, 8))[..., list(order)]
    words: torch.Tensor = (eights << 4 * torch.arange(8)).sum(-1)
    return words.int()


def gptq(symmetric: bool, stored_less: int) -> Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]:
    """int32 [in / 8, out] of inputs below each other; zero points, less `stored_less`, beside each other."""

    def quantize(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, meant = _int4(matrix, symmetric)
        tensors = {
            "qweight": _words(codes.t()).t().contiguous(),
            "qzeros": _words(zeros - stored_less),
            "scales": scales.half(),
            "g_idx": torch.arange(len(codes), dtype=torch.int32) // GROUP,
        }
        return {f"{name}.{key}": value for key, value in tensors.items()}, meant

    return quantize


def gptq_config(**changes: Any) -> dict[str, Any]:
    stated = {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
    return {"quant_method": "gptq", "lm_head": False, "damp_percent": 0.1, **stated, **changes}


def awq(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """int32 [in, out / 8] of outputs beside each other, even ones first."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes, scales, zeros, meant = _int4(matrix, symmetric=False)
    tensors = {
        "qweight": _words(codes, order=order),
        "qzeros": _words(zeros, order=order),
        "scales": scales.half(),
    }
    return {f"{name}.{key}": value for key, value in tensors.items()}, meant


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def packed(symmetric: bool) -> Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]:
    """compressed-tensors: int32 [out, in / 8] of inputs beside each other, zero points [out / 8, groups] of
    outputs below each other. All of them are from -8 to 7, and stored plus 8."""

    def quantize(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, meant = _int4(matrix, symmetric)
        tensors = {
            "weight_packed": _words(codes.t()),
            "weight_scale": scales.t().contiguous().half(),
            "weight_shape": torch.tensor(matrix.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _words(zeros).t().contiguous()
        return {f"{name}.{key}": value for key, value in tensors.items()}, meant

    return quantize


def integers_config(bits: int = 4, layout: str = "pack-quantized", **changes: Any) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": True,
        **changes,
    }
    group = {"targets": ["Linear"], "weights": weights}
    return fp8_config(format=layout, config_groups={"group_0": group})


# --- int8 ----------------------------------------------------------------------------------------------------


def int8_channels(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (matrix.abs().amax(1, keepdim=True) / 127).bfloat16().float()
    codes = (matrix / scale).round().clamp(-128, 127)
    return {f"{name}.weight": codes.to(torch.int8), f"{name}.weight_scale": scale.bfloat16()}, codes * scale


INT8 = integers_config(8, "int-quantized", strategy="channel", group_size=None)


# --- NVFP4 ---------------------------------------------------------------------------------------------------

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nvfp4(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Two inputs in a byte, the first in the low bits; a scale for 16 inputs, divided by one for all."""
    divisor = 448 * 6 / matrix.abs().max()
    largest = matrix.unflatten(1, (-1, 16)).abs().amax(2)
    scales = (largest / 6 * divisor).to(torch.float8_e4m3fn)
    scale = (scales.float() / divisor).repeat_interleave(16, 1)
    numbers = torch.tensor(E2M1)
    codes = (matrix.abs() / scale)[..., None].sub(numbers).abs().argmin(2)
    meant = numbers[codes].copysign(matrix) * scale
    codes = (codes + 8 * (matrix < 0)).to(torch.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    tensors = {
        "weight_packed": packed,
        "weight_scale": scales,
        "weight_global_scale": divisor.view(1),
        "input_global_scale": torch.tensor([31.5]),
    }
    return {f"{name}.{key}": value for key, value in tensors.items()}, meant


def nvfp4_config(*, rounds_activations: bool = True, **changes: Any) -> dict[str, Any]:
    """As llm-compressor writes it for NVFP4, or for NVFP4A16."""
    numbers = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, "dynamic": False, **changes},
        "input_activations": {**numbers, "dynamic": "local"} if rounds_activations else None,
    }
    return fp8_config(format="nvfp4-pack-quantized", config_groups={"group_0": group})


# --- MXFP4 ---------------------------------------------------------------------------------------------------


def mxfp4_gpt_oss(directory: Path) -> Checkpoint:
    """A gpt-oss with random experts in MXFP4, and with what transformers makes of them. Two ranks can share it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = save_tiny("gpt_oss", directory / "plain", num_attention_heads=8, intermediate_size=192)
    tensors = load_file(plain / "model.safetensors")
    blocks_and_scales: Tensors = {}
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        size = experts, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, size, generator=generator, dtype=torch.uint8)
        blocks_and_scales |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    quantized = directory / "quantized"
    quantized.mkdir()
    kept = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in blocks_and_scales}
    save_file(kept | blocks_and_scales, quantized / "model.safetensors")
    (quantized / "config.json").write_text((plain / "config.json").read_text())
    configure(quantized, quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    return Checkpoint(quantized, plain)
