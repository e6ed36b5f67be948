"""How a checkpoint stores the matrices of its linear layers, from config.json's `quantization_config`.

    fp8    compressed-tensors `float-quantized`, and quant_method `fp8` (Qwen3-FP8: a scale for 128 x 128 weights)
    int4   GPTQ without activation order (formats 1 and 2), AWQ `gemm`

Other formats are refused by name. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from engine.models.errors import ModelLoadError

SUPPORTED = (
    "supported are plain float32, bfloat16 and float16, compressed-tensors float-quantized (fp8), quant_method "
    "fp8, gptq and awq (gemm) of 4 bits"
)


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """float8_e4m3fn matrices, `NAME.weight`, and their scales.

    Activation scales, `NAME.input_scale`, are not used: each token is scaled by its own largest value.
    """

    name: ClassVar = "fp8"
    ignored: tuple[str, ...] = ()
    """Layers that are stored as plain numbers."""
    scale_name: str = "weight_scale"
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None: one scale per output, or one for all."""

    def matrix_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of such a matrix in memory."""
        return outputs * (inputs + 4)


@dataclass(frozen=True, slots=True)
class Int4Format:
    """Codes of four bits with a scale and a zero point for each output and group of inputs, packed in int32."""

    name: ClassVar = "int4"
    method: Literal["gptq", "awq"]
    group_size: int | None
    """Number of inputs that share a scale; None for all of them."""
    ignored: tuple[str, ...] = ()
    is_symmetric: bool = False
    """Whether all zero points are 8, whatever is stored: some writers confuse formats 1 and 2."""
    zero_offset: int = 0
    """Number to add to stored zero points: 1 in GPTQ's first format."""

    def group(self, inputs: int) -> int:
        """Return how many inputs share a scale in a matrix of `inputs` inputs."""
        return self.group_size or inputs

    def matrix_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of such a matrix in memory."""
        return outputs * (inputs // 2 + 5 * (inputs // self.group(inputs)))


WeightFormat = Fp8Format | Int4Format


def is_ignored(weights: WeightFormat, name: str) -> bool:
    """Whether the layer `name` ("model.layers.0.mlp.up_proj") is stored as plain numbers.

    An entry is a regular expression after "re:", or a name or whole parts of one ("lm_head", "mlp.down_proj").
    """
    return any(
        re.match(entry[3:], name) is not None if entry.startswith("re:") else f".{entry}." in f".{name}."
        for entry in weights.ignored
    )


def weight_format(raw: Mapping[str, Any]) -> WeightFormat | None:
    """Read the format from config.json `raw`; None for plain numbers. Raises ModelLoadError if unsupported."""
    stored = raw.get("quantization_config") or raw.get("compression_config")
    if not stored:
        return None
    method = str(stored.get("quant_method", "unknown"))
    readers: dict[str, Callable[[Mapping[str, Any]], WeightFormat]]
    readers = {"compressed-tensors": _compressed_tensors, "fp8": _fp8, "gptq": _gptq, "awq": _awq}
    if method not in readers:
        raise ModelLoadError(f"quantized weights ({method}) are not supported: {SUPPORTED}")
    return readers[method](stored)


def _compressed_tensors(stored: Mapping[str, Any]) -> Fp8Format:
    what = "compressed-tensors"
    groups = stored.get("config_groups") or {}
    if len(groups) != 1:
        raise _refusal(what, f"{len(groups)} groups of layers", "one, of all linear layers")
    [group] = groups.values()
    weights = group.get("weights") or {}
    _expect(what, "targets", group.get("targets"), ["Linear"])
    kind = f"{weights.get('type')} of {weights.get('num_bits')} bits"
    if kind != "float of 8 bits":
        raise _refusal(f"{what} {stored.get('format')}", f"weights {kind}", "float of 8 bits (float-quantized)")
    if stored.get("format") not in ("float-quantized", "naive-quantized"):
        raise _refusal(what, f"format {stored.get('format')!r}", "float-quantized")
    sparsity = (stored.get("sparsity_config") or {}).get("format", "dense")
    _expect(what, "sparsity_config.format", sparsity, "dense")
    strategy, ignored = weights.get("strategy"), tuple(stored.get("ignore") or ())
    if strategy not in ("tensor", "channel", "block"):
        raise _refusal(what, f"weights of strategy {strategy!r}", "tensor, channel or block")
    return Fp8Format(ignored, block=_block(what, weights.get("block_structure")) if strategy == "block" else None)


def _fp8(stored: Mapping[str, Any]) -> Fp8Format:
    _expect("fp8", "fmt", stored.get("fmt", "e4m3"), "e4m3")
    ignored = tuple(stored.get("modules_to_not_convert") or stored.get("ignored_layers") or ())
    if stored.get("weight_block_size") is None:
        return Fp8Format(ignored)
    return Fp8Format(ignored, "weight_scale_inv", _block("fp8", stored["weight_block_size"]))


def _block(method: str, sizes: Any) -> tuple[int, int]:
    if isinstance(sizes, list) and len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes):
        return sizes[0], sizes[1]
    raise _refusal(method, f"blocks of {sizes!r}", "two positive sizes, such as [128, 128]")


def _gptq(stored: Mapping[str, Any]) -> Int4Format:
    _expect("gptq", "bits", stored.get("bits"), 4)
    layout = stored.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _refusal("gptq", f"checkpoint_format {layout!r}", "gptq or gptq_v2")
    for key in ("dynamic", "modules_in_block_to_quantize"):
        if stored.get(key):
            raise _refusal("gptq", f"{key}, which treats layers differently", "all linear layers alike")
    if stored.get("desc_act", False):
        raise _refusal("gptq", "desc_act: true (inputs in the order of their activations)", "desc_act: false")
    group, is_symmetric = _group_size("gptq", stored), bool(stored.get("sym", True))
    return Int4Format("gptq", group, (), is_symmetric, zero_offset=1 if layout == "gptq" else 0)


def _awq(stored: Mapping[str, Any]) -> Int4Format:
    _expect("awq", "bits", stored.get("bits", stored.get("w_bit")), 4)
    _expect("awq", "version", str(stored.get("version", "gemm")).lower(), "gemm")
    _expect("awq", "zero_point", stored.get("zero_point", True), True)
    return Int4Format("awq", _group_size("awq", stored), tuple(stored.get("modules_to_not_convert") or ()))


def _group_size(method: str, stored: Mapping[str, Any]) -> int | None:
    size = stored.get("group_size", stored.get("q_group_size"))
    if size == -1:
        return None
    if not isinstance(size, int) or size < 32 or size % 32:
        raise _refusal(method, f"group_size {size!r}", "a multiple of 32, or -1 for one group")
    return size


def _expect(method: str, key: str, value: Any, expected: Any) -> None:
    if value != expected:
        raise _refusal(method, f"{key} {value!r}", repr(expected))


def _refusal(method: str, found: str, expected: str) -> ModelLoadError:
    return ModelLoadError(
        f"quantized weights ({method}): {found} is not supported, expected {expected}; {SUPPORTED}"
    )
