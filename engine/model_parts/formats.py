"""Formats in which a checkpoint stores the matrices of its linear layers, from `quantization_config`.

    fp8    compressed-tensors `float-quantized`, and quant_method `fp8` (Qwen3-FP8: a scale for 128 x 128 weights)
    int4   GPTQ without activation order (formats 1 and 2), AWQ `gemm`, compressed-tensors `pack-quantized` (W4A16)
    int8   compressed-tensors `int-quantized`, which is widened when it is loaded
    nvfp4  compressed-tensors `nvfp4-pack-quantized`, which is widened too

MXFP4 is a format of experts only. Errors name other formats. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from engine.base.errors import ModelLoadError

SUPPORTED = (
    "supported are plain float32, bfloat16 and float16, compressed-tensors float-quantized (fp8), pack-quantized "
    "(4 bits), nvfp4-pack-quantized and int-quantized (8 bits), quant_method fp8, gptq and awq (gemm) of 4 bits"
)
MXFP4_INPUTS = 32
"""Inputs of an output that share an exponent in MXFP4."""
NVFP4_INPUTS = 16
"""Inputs of an output that share a scale in NVFP4."""


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """float8_e4m3fn matrices, `NAME.weight`, and their scales.

    Activation scales, `NAME.input_scale`, are not used: each token is scaled by its own largest value.
    """

    name: ClassVar = "fp8"
    is_kept: ClassVar = True
    ignored: tuple[str, ...] = ()
    """Layers that are stored as plain numbers."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None: one scale per output, or one for all."""

    @property
    def scale_names(self) -> tuple[str, ...]:
        """Possible names of scales below a matrix's name. Both multiply the weights."""
        names = "weight_scale", "weight_scale_inv"
        return names if self.block is None else names[::-1]

    @property
    def kept_block(self) -> tuple[int, int] | None:
        """The block, if memory can hold its scales: of 128 inputs and a multiple of 32 outputs."""
        return self.block if self.block is not None and not self.block[0] % 32 and self.block[1] == 128 else None

    def matrix_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of such a matrix in memory, if projections and ranks divide no blocks."""
        if self.kept_block is not None and not (outputs % 32 or inputs % 128):
            return outputs * inputs + outputs // 32 * (inputs // 128) * 4
        return outputs * (inputs + 4)


@dataclass(frozen=True, slots=True)
class Int4Format:
    """Codes of four bits with a scale and a zero point for each output and group of inputs, packed in int32."""

    name: ClassVar = "int4"
    is_kept: ClassVar = True
    method: Literal["gptq", "awq", "compressed-tensors"]
    group_size: int | None
    """Number of inputs that share a scale; None for all."""
    ignored: tuple[str, ...] = ()
    is_symmetric: bool = False
    """Whether all zero points are 8. Stored ones are then ignored, because some writers confuse formats 1 and
    2."""
    zero_offset: int = 0
    """Number to add to stored zero points: 1 in GPTQ's first format."""

    @property
    def codes_name(self) -> str:
        """Name of the codes below a matrix's name."""
        return "weight_packed" if self.method == "compressed-tensors" else "qweight"

    def group(self, inputs: int) -> int:
        """Return how many inputs share a scale in a matrix of `inputs` inputs."""
        return self.group_size or inputs

    def matrix_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of such a matrix in memory."""
        return outputs * (inputs // 2 + 5 * (inputs // self.group(inputs)))


@dataclass(frozen=True, slots=True)
class Int8Format:
    """int8 matrices, `NAME.weight`, and scales, one per output or one for all. They are widened when they are
    loaded, because no layer computes with them; the native kernels may round them again (`quantization: int8`).
    """

    name: ClassVar = "int8"
    is_kept: ClassVar = False
    scale_names: ClassVar = ("weight_scale",)
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Nvfp4Format:
    """Codes of four bits, two in a byte of `NAME.weight_packed`, with scales at two levels: a number is

        e2m1 * NAME.weight_scale (float8_e4m3fn, of an output and 16 inputs) / NAME.weight_global_scale (float32)

    They are widened when they are loaded, because no layer computes with them.
    """

    name: ClassVar = "nvfp4"
    is_kept: ClassVar = False
    ignored: tuple[str, ...] = ()
    rounds_activations: bool = False
    """Whether the checkpoint was made for activations in four bits, too; here they stay unquantized."""


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """Experts in MXFP4 (gpt-oss), next to plain matrices (`engine/loading/mxfp4.py`)."""

    name: ClassVar = "mxfp4"

    def matrix_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of such a matrix in memory."""
        return outputs * (inputs // 2 + inputs // MXFP4_INPUTS)


KeptFormat = Fp8Format | Int4Format
"""Formats that memory keeps."""
WidenedFormat = Int8Format | Nvfp4Format
"""Formats that are widened when they are loaded."""
WeightFormat = KeptFormat | WidenedFormat


def is_ignored(weights: WeightFormat, name: str) -> bool:
    """Whether config.json lists the layer `name` ("model.layers.0.mlp.up_proj") as stored in plain numbers.

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


def _compressed_tensors(stored: Mapping[str, Any]) -> WeightFormat:
    what = "compressed-tensors"
    groups = stored.get("config_groups") or {}
    if len(groups) != 1:
        raise _refusal(what, f"{len(groups)} groups of layers", "one, of all linear layers")
    [group] = groups.values()
    weights = group.get("weights") or {}
    _expect(what, "targets", group.get("targets"), ["Linear"])
    sparsity = (stored.get("sparsity_config") or {}).get("format", "dense")
    _expect(what, "sparsity_config.format", sparsity, "dense")
    kind, layout = f"{weights.get('type')} of {weights.get('num_bits')} bits", stored.get("format")
    ignored = tuple(stored.get("ignore") or ())
    if kind == "float of 4 bits":
        return _nvfp4(layout, weights, ignored, rounds_activations=bool(group.get("input_activations")))
    readers: dict[str, Callable[[Any, Mapping[str, Any], tuple[str, ...]], WeightFormat]]
    readers = {"float of 8 bits": _floats, "int of 4 bits": _packed, "int of 8 bits": _bytes}
    if kind not in readers:
        raise _refusal(f"{what} {layout}", f"weights {kind}", ", ".join((*readers, "float of 4 bits")))
    return readers[kind](layout, weights, ignored)


def _floats(layout: Any, weights: Mapping[str, Any], ignored: tuple[str, ...]) -> Fp8Format:
    what = "compressed-tensors"
    if layout not in ("float-quantized", "naive-quantized"):
        raise _refusal(what, f"format {layout!r} of fp8", "float-quantized")
    _expect(what, "symmetric", weights.get("symmetric", True), True)
    strategy = _strategy(what, weights, "tensor", "channel", "block")
    return Fp8Format(ignored, block=_block(what, weights.get("block_structure")) if strategy == "block" else None)


def _packed(layout: Any, weights: Mapping[str, Any], ignored: tuple[str, ...]) -> Int4Format:
    what = "compressed-tensors of 4 bits"
    _expect(what, "format", layout, "pack-quantized")
    if weights.get("actorder") in ("group", True):
        raise _refusal(what, "actorder 'group' (inputs in the order of their activations)", "weight, or none")
    is_whole = _strategy(what, weights, "group", "channel") == "channel"
    group = None if is_whole else _group_size(what, weights)
    return Int4Format("compressed-tensors", group, ignored, bool(weights.get("symmetric", True)))


def _bytes(layout: Any, weights: Mapping[str, Any], ignored: tuple[str, ...]) -> Int8Format:
    what = "compressed-tensors of 8 bits"
    if layout not in ("int-quantized", "naive-quantized"):
        raise _refusal(what, f"format {layout!r}", "int-quantized")
    _expect(what, "symmetric", weights.get("symmetric", True), True)
    _strategy(what, weights, "tensor", "channel")
    return Int8Format(ignored)


def _nvfp4(
    layout: Any, weights: Mapping[str, Any], ignored: tuple[str, ...], *, rounds_activations: bool
) -> Nvfp4Format:
    what = "compressed-tensors of 4 bits"
    _expect(what, "format", layout, "nvfp4-pack-quantized")
    _expect(what, "symmetric", weights.get("symmetric", True), True)
    _strategy(what, weights, "tensor_group")
    _expect(what, "group_size", weights.get("group_size"), NVFP4_INPUTS)
    return Nvfp4Format(ignored, rounds_activations)


def _strategy(method: str, weights: Mapping[str, Any], *known: str) -> str:
    strategy = weights.get("strategy")
    if strategy not in known:
        raise _refusal(method, f"weights of strategy {strategy!r}", " or ".join(known))
    return str(strategy)


def _fp8(stored: Mapping[str, Any]) -> Fp8Format:
    _expect("fp8", "fmt", str(stored.get("fmt", "e4m3")).removeprefix("float8_").removesuffix("fn"), "e4m3")
    ignored = tuple(stored.get("modules_to_not_convert") or stored.get("ignored_layers") or ())
    if stored.get("weight_block_size") is None:
        return Fp8Format(ignored)
    return Fp8Format(ignored, _block("fp8", stored["weight_block_size"]))


def _block(method: str, sizes: Any) -> tuple[int, int]:
    if isinstance(sizes, list) and len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes):
        return sizes[0], sizes[1]
    raise _refusal(method, f"blocks of {sizes!r}", "two positive sizes, such as [128, 128]")


def _gptq(stored: Mapping[str, Any]) -> Int4Format:
    _expect("gptq", "bits", stored.get("bits"), 4)
    layout = stored.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _refusal("gptq", f"checkpoint_format {layout!r}", "gptq or gptq_v2")
    if stored.get("modules_in_block_to_quantize"):
        raise _refusal(
            "gptq", "modules_in_block_to_quantize, which treats layers differently", "all linear layers alike"
        )
    ignored = _left_plain(stored.get("dynamic") or {})
    if stored.get("desc_act", False):
        raise _refusal("gptq", "desc_act: true (inputs in the order of their activations)", "desc_act: false")
    group, is_symmetric = _group_size("gptq", stored), bool(stored.get("sym", True))
    return Int4Format("gptq", group, ignored, is_symmetric, zero_offset=1 if layout == "gptq" else 0)


def _left_plain(dynamic: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the layers that `dynamic` leaves plain: regular expressions after "-:". Other entries change bits."""
    if changed := [pattern for pattern in dynamic if not pattern.startswith("-:")]:
        raise _refusal(
            "gptq", f"dynamic {changed[0]!r}, which treats layers differently", 'only entries after "-:"'
        )
    return tuple(f"re:{pattern[2:]}" for pattern in dynamic)


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
