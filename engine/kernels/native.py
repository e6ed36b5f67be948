"""The Python side of the native kernels: the library, its instruction set, and its structs."""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Callable
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

from engine.base.host_memory import untouched_zeros

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).parent / "libraydix.so"
ISAS = ("generic", "avx2", "avx512", "avx512_bf16", "amx")
"""Instruction sets, each of which includes those before it."""
_ABI = 14
_REBUILD = "install a C compiler and run `python -m engine.kernels.build`"
_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class NativeUnavailable(Exception):
    """The native kernels cannot be used; the message says why."""


class NativeGrouping(Structure):
    """The format of codes and scales (`Grouping` in raydix.h)."""

    _fields_ = [(name, c_int32) for name in ("bits", "inputs", "scale_bytes", "has_leasts")]


class NativeLinear(Structure):
    """A packed matrix (`Linear` in raydix.h)."""

    _fields_ = [
        ("packed", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        *((name, c_int32) for name in ("outputs", "inputs")),
        *((name, c_float) for name in ("alpha", "limit")),
        ("groups", NativeGrouping),
    ]


class NativeExperts(Structure):
    """A layer's mixture of experts (`Experts` in raydix.h)."""

    _fields_ = [
        ("router", NativeLinear),
        ("correction", c_void_p),
        ("gate_up", POINTER(NativeLinear)),
        ("down", POINTER(NativeLinear)),
        ("shared_gate_up", NativeLinear),
        ("shared_down", NativeLinear),
        *((name, c_int32) for name in ("num_experts", "per_token", "intermediate", "shared_intermediate")),
        *((name, c_int32) for name in ("num_groups", "groups_per_token")),
        ("scaling", c_float),
        *((name, c_bool) for name in ("is_sigmoid", "renormalizes", "is_clamped")),
    ]


class NativeLayer(Structure):
    """One layer's weights (`Layer` in raydix.h)."""

    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "post_norm", "attended_norm", "output_norm", "qk_norm")),
        ("sinks", c_void_p),
        ("experts", POINTER(NativeExperts)),
        ("qkv", NativeLinear),
        ("output", NativeLinear),
        ("gate_up", NativeLinear),
        ("down", NativeLinear),
        ("window", c_int32),
        *((name, c_int32) for name in ("rope", "table", "number")),
        ("before", c_void_p),
    ]


class NativeModel(Structure):
    """A model's shape and weights (`Model` in raydix.h)."""

    _fields_ = [
        *((name, c_int32) for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads")),
        *((name, c_int32) for name in ("head_dim", "num_ropes", "num_tables")),
        *((name, c_float) for name in ("norm_eps", "own_eps", "attention_scale", "soft_cap")),
        ("inv_freq", c_void_p),
        ("rope_factors", c_void_p),
        ("embed", c_void_p),
        ("table", NativeLinear),
        ("embedding_scale", c_float),
        ("layers", POINTER(NativeLayer)),
        ("norm", c_void_p),
        ("head", NativeLinear),
        ("is_gelu", c_bool),
        ("norms_all_heads", c_bool),
    ]


class NativeBatch(Structure):
    """A step's ragged batch (`Batch` in raydix.h)."""

    _fields_ = [
        *((name, c_int32) for name in ("num_rows", "num_tokens", "num_decodes", "table_width")),
        *((name, c_void_p) for name in ("qo_indptr", "kv_lens", "block_table", "slot_mapping", "positions")),
        ("token_ids", c_void_p),
        *((name, c_void_p) for name in ("groups", "members", "shared")),
        ("num_groups", c_int32),
    ]


class NativePages(Structure):
    """Addresses and strides, in elements, of keys and values (`Pages` in raydix.h)."""

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        *((name, c_int64) for name in ("layer_stride", "page_stride", "slot_stride", "head_stride")),
        ("page_size", c_int32),
    ]


class NativeAttentionShape(Structure):
    """Heads, window and operations on scores (`AttentionShape` in raydix.h)."""

    _fields_ = [
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "window", "head_dim", "value_dim")),
        *((name, c_float) for name in ("scale", "soft_cap")),
        ("sinks", c_void_p),
    ]


class NativeDeltaNet(Structure):
    """A recurrent layer (`DeltaNet` in raydix.h)."""

    _fields_ = [
        *((name, c_void_p) for name in ("conv", "norm")),
        *((name, c_int32) for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim")),
        *((name, c_int32) for name in ("kernel", "channels")),
        ("eps", c_float),
    ]


class NativeDeltaStates(Structure):
    """All slots of a recurrent layer (`DeltaStates` in raydix.h)."""

    _fields_ = [*((name, c_void_p) for name in ("inputs", "matrices"))]


class NativeDeltaSteps(Structure):
    """Rows that advance by one token (`DeltaSteps` in raydix.h)."""

    _fields_ = [
        *((name, c_void_p) for name in ("mixed", "decay", "strength", "z", "out", "sources", "targets")),
        *((name, c_int64) for name in ("mixed_stride", "z_stride")),
        ("num_rows", c_int32),
    ]


class NativeDeltaKept(Structure):
    """A slot in which a row's state is kept (`DeltaKept` in raydix.h)."""

    _fields_ = [*((name, c_int64) for name in ("end", "slot"))]


class NativeDeltaRow(Structure):
    """A row of many tokens (`DeltaRow` in raydix.h)."""

    _fields_ = [
        *((name, c_void_p) for name in ("mixed", "decay", "strength", "z", "out")),
        ("kept", POINTER(NativeDeltaKept)),
        *((name, c_int64) for name in ("mixed_stride", "z_stride", "source")),
        *((name, c_int32) for name in ("num_tokens", "num_replayed", "num_kept")),
    ]


class SampledRow(Structure):
    """Parameters of a row's token (`SampledRow` in raydix.h)."""

    _fields_ = [
        ("seed", c_uint64),
        ("position", c_int64),
        *((name, c_double) for name in ("temperature", "top_p", "min_p", "presence", "frequency")),
        *((name, c_void_p) for name in ("counts", "tail", "edited", "edits", "mask")),
        ("repetition", c_float),
        *((name, c_int32) for name in ("top_k", "num_tail", "num_edits", "mask_words", "num_top")),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "raydix_attention": (
        None,
        [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int32],
    ),
    "raydix_attention_bytes": (c_int64, [c_void_p, c_void_p, c_int32]),
    "raydix_delta_rows": (None, [c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_int32]),
    "raydix_delta_rows_bytes": (c_int64, [c_void_p, c_int32]),
    "raydix_delta_step": (None, [c_void_p, c_void_p, c_void_p, c_int32]),
    "raydix_forward": (None, [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int32]),
    "raydix_forward_bytes": (c_int64, [c_void_p, c_void_p, c_int32]),
    "raydix_linear": (None, [c_void_p, c_void_p, c_int64, c_int32, c_int32, c_void_p, c_int64, c_int32]),
    "raydix_logits": (None, [c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_int32]),
    "raydix_pack": (None, [c_void_p, c_int32, c_int32, c_bool, c_void_p]),
    "raydix_pack_blocks": (None, [*[c_void_p] * 4, c_int32, c_int32, c_bool, c_void_p]),
    "raydix_pack_int8": (None, [c_void_p, c_int32, c_int32, c_bool, c_void_p, c_void_p]),
}
"""Result and argument types of the kernels that exist for each element type and instruction set."""
_FLOAT32_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "raydix_sample": (
        None,
        [c_void_p, c_int32, c_void_p, c_int64, c_int32, *[c_void_p] * 4, c_int32, c_void_p, c_int32],
    ),
    "raydix_sample_bytes": (c_int64, [c_int32, c_int32]),
}
"""Result and argument types of the kernels that exist only for float32."""


class Kernels:
    """The kernels for one element type. Pointers are passed as addresses; the C side checks nothing."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, isa: str) -> None:
        self.dtype = dtype
        self.isa = isa
        """Their instruction set; sets that only help bfloat16 do not exist for float32."""
        signatures = _SIGNATURES | (_FLOAT32_SIGNATURES if dtype == torch.float32 else {})
        for name, signature in signatures.items():
            setattr(self, name.removeprefix("raydix_"), self._kernel(library, name, signature))

    attention: Callable[..., None]
    attention_bytes: Callable[..., int]
    delta_rows: Callable[..., None]
    delta_rows_bytes: Callable[..., int]
    delta_step: Callable[..., None]
    forward: Callable[..., None]
    forward_bytes: Callable[..., int]
    linear: Callable[..., None]
    logits: Callable[..., None]
    pack: Callable[..., None]
    pack_blocks: Callable[..., None]
    pack_int8: Callable[..., None]
    sample: Callable[..., None]
    sample_bytes: Callable[..., int]

    def _kernel(self, library: ctypes.CDLL, name: str, signature: tuple[Any, list[Any]]) -> Callable[..., Any]:
        function = getattr(library, f"{name}_{_TYPES[self.dtype]}_{self.isa}")
        function.restype, function.argtypes = signature
        return cast("Callable[..., Any]", function)


@cache
def kernels(dtype: torch.dtype, isa: str | None = None) -> Kernels:
    """Return the kernels for elements of `dtype`, with `isa` or the best that is built and runs on this processor.

    The environment variable RAYDIX_ISA is the default of `isa`. Raises NativeUnavailable.
    """
    library, built = _load(), built_isas(dtype)
    library.raydix_best_isa.restype = c_char_p
    best = library.raydix_best_isa().decode()
    wanted = isa or os.environ.get("RAYDIX_ISA") or best
    if wanted not in ISAS:
        raise NativeUnavailable(f"RAYDIX_ISA is {wanted!r}; there are {', '.join(ISAS)}")
    if ISAS.index(wanted) > ISAS.index(best):
        raise NativeUnavailable(
            f"RAYDIX_ISA is {wanted}, but this processor has {best}: set it to that or less, or unset it"
        )
    usable = [name for name in built if ISAS.index(name) <= ISAS.index(wanted)]
    if not usable:
        raise NativeUnavailable(f"{LIBRARY.name} has no kernels for {dtype}: {_REBUILD}")
    missing = build_log()
    logger.info("native kernels for %s: %s%s", dtype, usable[-1], f" ({missing})" if missing else "")
    return Kernels(library, dtype, usable[-1])


def built_isas(dtype: torch.dtype) -> list[str]:
    """Return the instruction sets for which the library has kernels, the best last. Raises NativeUnavailable."""
    if dtype not in _TYPES:
        raise NativeUnavailable(
            f"there are native kernels for float32 and bfloat16, not for {str(dtype).removeprefix('torch.')}"
        )
    library = _load()
    return [name for name in ISAS if hasattr(library, f"raydix_forward_{_TYPES[dtype]}_{name}")]


@cache
def _load() -> ctypes.CDLL:
    path = Path(os.environ.get("RAYDIX_NATIVE_LIBRARY", LIBRARY))
    if not path.exists():
        raise NativeUnavailable(f"{path.name} is missing ({build_log() or 'it was not built'}): {_REBUILD}")
    try:
        library = ctypes.CDLL(str(path), mode=_openmp(path))
        found = library.raydix_abi()
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{path.name} cannot be loaded ({error}): {_REBUILD}") from error
    if found != _ABI:
        raise NativeUnavailable(f"{path.name} is of another version of Raydix ({found}, not {_ABI}): {_REBUILD}")
    library.raydix_find_groups.argtypes = [c_void_p, c_int32, c_int32, *[c_void_p] * 4]
    library.raydix_copy_pages.argtypes = [c_void_p, *[c_int64] * 4, c_void_p, c_int64]
    library.raydix_copy_pages.restype = None
    return library


def forget() -> None:
    """Forget the library, so that the next use loads it with the environment of that time. For tests."""
    kernels.cache_clear()
    _load.cache_clear()


def build_log() -> str:
    """Return what the build of the library omitted and why, as one line; "" if nothing is missing."""
    try:
        return "; ".join(LIBRARY.with_suffix(".log").read_text(encoding="utf-8").splitlines())
    except OSError:
        return ""


def _openmp(library: Path) -> int:
    """Return the mode in which to load the library so that it uses torch's threads: two OpenMP runtimes have two
    pools, which both spin.

    gcc's code uses any runtime whose symbols are global. torch's wheels have a private one, which is made global
    here; clang's code needs its own runtime, which torch's must not replace. Raises OSError.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return ctypes.DEFAULT_MODE
    if b"libomp.so" in library.read_bytes():
        return os.RTLD_DEEPBIND
    loaded = re.findall(r"(/.*/lib(?:gomp|iomp5|omp)[-.][^/]*)$", maps.read_text(), re.M)
    of_torch = [path for path in loaded if path.startswith(str(Path(torch.__file__).parent))]
    ctypes.CDLL([*of_torch, *loaded, "libgomp.so.1"][0], mode=ctypes.RTLD_GLOBAL)
    return ctypes.DEFAULT_MODE


class Workspace:
    """Scratch memory of a kernel, kept from step to step and enlarged if necessary."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def address(self, num_bytes: int) -> int:
        """Return the address of at least `num_bytes` bytes, a multiple of 64."""
        if self._memory.numel() < num_bytes + 64:
            self._memory = untouched_zeros(num_bytes + num_bytes // 4 + 64)
        return -(-self._memory.data_ptr() // 64) * 64


def batch_struct(batch: Any) -> NativeBatch:
    """Return an `AttentionBatch` on a CPU as a struct that points into its tensors, which must outlive it.

    `token_ids` is not part of a batch; callers that need more than attention set it.
    """
    return NativeBatch(
        len(batch.query_lens),
        batch.positions.shape[0],
        batch.num_decodes,
        batch.block_table.shape[1],
        batch.qo_indptr.data_ptr(),
        batch.kv_lens.data_ptr(),
        batch.block_table.data_ptr(),
        batch.slot_mapping.data_ptr(),
        batch.positions.data_ptr(),
    )


def group_rows(batch: NativeBatch, page_size: int, group: int) -> object:
    """Group rows whose block tables begin alike, so that they attend to their shared prefix together, `group`
    query heads per KV head. Returns the memory into which the struct then points. Raises NativeUnavailable.
    """
    rows = batch.num_rows
    memory = (c_int32 * (8 * rows))()  # groups of three numbers; members; shared; memory of the search
    start = ctypes.addressof(memory)
    groups, members, shared, work = (start + row * rows * 4 for row in (0, 3, 4, 5))
    found = _load().raydix_find_groups(ctypes.byref(batch), page_size, group, groups, members, shared, work)
    if found:
        batch.groups, batch.members, batch.shared, batch.num_groups = groups, members, shared, found
    return memory


def page_copier() -> Callable[..., None]:
    """Return the function that copies pages (pages.c). Raises NativeUnavailable."""
    return cast("Callable[..., None]", _load().raydix_copy_pages)


def pages_struct(data: torch.Tensor) -> NativePages:
    """Return KV pages as a struct: [num_layers, 2, num_pages, page_size, num_kv_heads, head_dim], any strides; or
    [num_layers, 1, ...] if values are part of keys.
    """
    to_values = 0 if data.shape[1] == 1 else data.stride(1) * data.element_size()
    return NativePages(
        data.data_ptr(),
        data.data_ptr() + to_values,
        data.stride(0),
        *data.stride()[2:5],
        data.shape[3],
    )
