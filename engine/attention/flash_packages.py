"""The packages that provide FlashAttention: how each is called, and what it supports.

All of them take queries, keys and values first, then keyword arguments whose names differ:

    package                  decode rows                     prefill rows
    flash_attn_interface     flash_attn_with_kvcache         the same, ragged
    vllm.vllm_flash_attn     flash_attn_varlen_func          the same
    vllm_flash_attn          flash_attn_with_kvcache         flash_attn_varlen_func
    flash_attn               flash_attn_with_kvcache         flash_attn_varlen_func

Sources: hopper/flash_attn_interface.py and flash_attn/flash_attn_interface.py of Dao-AILab/flash-attention,
vllm_flash_attn/flash_attn_interface.py of vllm-project/flash-attention (main and v2.6.2), and the checks in the
flash_api.cpp next to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from engine.attention.base import AttentionShape
from engine.attention.packages import Capability, capability, imported, lacks

_SHARED = ("softmax_scale", "causal", "window_size")
_RAGGED = ("cu_seqlens_q", "max_seqlen_q")


@dataclass(frozen=True, slots=True)
class Call:
    """A package's function that attends over paged KV."""

    function: str
    arguments: tuple[str, ...]
    """Names of its keyword arguments, after queries, keys and values."""

    @property
    def is_ragged(self) -> bool:
        """Whether queries are [tokens, heads, head_dim]; otherwise they are [rows, 1, heads, head_dim]."""
        return "cu_seqlens_q" in self.arguments

    @property
    def takes_out(self) -> bool:
        """Whether it writes its result into a given tensor."""
        return "out" in self.arguments


@dataclass(frozen=True, slots=True)
class Package:
    """A package that can be installed, with its requirements."""

    title: str
    module: str
    install: str | None
    """Package to install for it; None if none that works with Raydix's torch provides it."""
    page_multiple: int
    """The page size must be a multiple of this many tokens."""
    oldest: Capability
    """Lowest compute capability that it has kernels for."""
    below: Capability | None
    """Compute capability from which on it has no kernels; None if it supports the newest."""
    decode: Call
    prefill: Call
    head_multiple: int = 8
    """head_dim must be a multiple of this."""
    largest_head: int = 256
    """Largest head_dim."""

    def misfit(self, shape: AttentionShape, gpu: Capability | None) -> str | None:
        """Return why it cannot compute such heads on such a GPU (None for any GPU); None when it can."""
        if not self.has_kernels_for(gpu):
            until = f", below {_dotted(self.below)}" if self.below else ""
            return f"it needs compute capability {_dotted(self.oldest)}{until}; this GPU has {_dotted(gpu)}"
        if shape.head_dim % self.head_multiple or shape.head_dim > self.largest_head:
            return (
                f"head_dim must be a multiple of {self.head_multiple} up to {self.largest_head}; "
                f"the model's is {shape.head_dim}"
            )
        if shape.page_size % self.page_multiple:
            return (
                f"page_size must be a multiple of {self.page_multiple} for {self.title}, not {shape.page_size}; "
                f"set page_size: {self.page_multiple}{_or_install(self, gpu)}"
            )
        return None

    def has_kernels_for(self, gpu: Capability | None) -> bool:
        """Whether it has kernels for such a GPU; None stands for any."""
        return gpu is None or (gpu >= self.oldest and (self.below is None or gpu < self.below))


_KVCACHE = ("cache_seqlens", "block_table", *_SHARED)
_VARLEN = (*_RAGGED, "max_seqlen_k", "block_table", *_SHARED)
_HOPPER = ("cache_seqlens", "page_table", *_SHARED)

PACKAGES = (
    Package(
        title="FlashAttention-3",
        module="flash_attn_interface",
        install="FlashAttention-3",
        page_multiple=1,
        oldest=(9, 0),
        below=(10, 0),
        decode=Call("flash_attn_with_kvcache", _HOPPER),
        prefill=Call("flash_attn_with_kvcache", (*_HOPPER, *_RAGGED)),
    ),
    Package(
        title="vLLM's FlashAttention",
        module="vllm.vllm_flash_attn",
        install="vllm",
        page_multiple=16,
        oldest=(8, 0),
        below=None,
        decode=Call("flash_attn_varlen_func", (*_VARLEN, "seqused_k", "out")),
        prefill=Call("flash_attn_varlen_func", (*_VARLEN, "seqused_k", "out")),
    ),
    Package(
        title="vllm-flash-attn",
        module="vllm_flash_attn",
        install=None,
        page_multiple=16,
        oldest=(8, 0),
        below=(10, 0),
        decode=Call("flash_attn_with_kvcache", (*_KVCACHE, "out")),
        prefill=Call("flash_attn_varlen_func", (*_VARLEN, "cu_seqlens_k", "out")),
    ),
    Package(
        title="flash_attn 2.x",
        module="flash_attn",
        install="flash-attn",
        page_multiple=256,
        oldest=(8, 0),
        below=None,
        decode=Call("flash_attn_with_kvcache", _KVCACHE),
        prefill=Call("flash_attn_varlen_func", (*_VARLEN, "cu_seqlens_k")),
    ),
)
"""Supported packages, the best first."""

INSTALL = (
    "install FlashAttention-3 (hopper/ of its repository, any page size, Hopper GPUs), vllm (page_size 16), or "
    "pip install --no-build-isolation 'raydix[flash-attn]' (page_size 256)"
)


@dataclass(frozen=True, slots=True)
class FoundPackage:
    """A package that imports and supports the model and the GPU."""

    package: Package
    module: ModuleType
    extra: Mapping[str, Any]
    """Arguments of both calls that only this package takes."""

    def function(self, call: Call) -> Callable[..., Any]:
        """Return the package's function for a call."""
        found: Callable[..., Any] = getattr(self.module, call.function)
        return found


def find_package(shape: AttentionShape, device: torch.device) -> FoundPackage | str:
    """Return the first package that imports and fits a CUDA device, or why none does and what to do."""
    gpu, reasons = capability(device), []
    for package in PACKAGES:
        module = imported(package.module)
        if module == "":
            continue
        reason = module if isinstance(module, str) else _mismatch(package, module) or package.misfit(shape, gpu)
        if reason is None and not isinstance(module, str):
            extra = {} if gpu is None else _generation(module, device)
            if not isinstance(extra, str):
                return FoundPackage(package, module, extra)
            reason = extra
        reasons.append(f"{package.module}: {reason}")
    if reasons:
        return "; ".join(reasons)
    return f"none of {', '.join(package.module for package in PACKAGES)} is installed: {INSTALL}"


def _mismatch(package: Package, module: ModuleType) -> str | None:
    for call in (package.decode, package.prefill):
        if reason := lacks(module, call.function, call.arguments):
            return f"{reason}, so this is a version that Raydix does not support; {INSTALL}"
    return None


def _generation(module: ModuleType, device: torch.device) -> dict[str, Any] | str:
    """Return the argument that selects a generation of vLLM's kernels (its default is the second), or why none
    runs here. Other packages have one generation and get no argument.
    """
    is_supported = getattr(module, "is_fa_version_supported", None)
    if is_supported is None:
        return {}
    for version in (3, 2):
        if is_supported(version, device):
            return {"fa_version": version}
    return str(module.fa_version_unsupported_reason(2, device))


def _or_install(package: Package, gpu: Capability | None) -> str:
    """Name the packages that support smaller pages."""
    others = [
        f"{other.install} ({'any' if other.page_multiple == 1 else f'multiples of {other.page_multiple}'})"
        for other in PACKAGES
        if other.install and other.page_multiple < package.page_multiple and other.has_kernels_for(gpu)
    ]
    return f", or install {' or '.join(others)}" if others else ""


def _dotted(version: Capability | None) -> str:
    return "unknown" if version is None else f"{version[0]}.{version[1]}"
