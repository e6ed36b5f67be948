"""Optional packages with GPU kernels: whether they import here, and whether they support a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import torch

Capability = tuple[int, int]
"""Compute capability of a GPU: (9, 0) is Hopper, (8, 0) the A100."""

HALF_TYPES = (torch.bfloat16, torch.float16)
"""Types that these packages compute in."""

_TRTLLM_PAGES = (16, 32, 64)


def imported(name: str) -> ModuleType | str:
    """Return the module, or why it does not import: "" if it is not installed at all."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        is_absent = error.name is not None and f"{name}.".startswith(f"{error.name}.")
        return "" if is_absent else _text(error)
    except Exception as error:  # A package built for another torch or CUDA may raise anything.
        return _text(error)


def lacks(module: ModuleType, function: str, arguments: Sequence[str]) -> str | None:
    """Return which of these arguments the module's function does not support; None if it supports all."""
    found = getattr(module, function, None)
    if found is None:
        return f"it has no {function}"
    parameters = inspect.signature(found).parameters
    missing = [name for name in arguments if name not in parameters]
    return f"its {function} has no argument {', '.join(missing)}" if missing else None


def capability(device: torch.device) -> Capability | None:
    """Return the GPU's compute capability; None if there is no GPU."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def misfit(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why none of these packages supports such a type on such a device; None if some may."""
    if device.type != "cuda":
        return f"it runs on CUDA GPUs, not on {device}"
    if dtype not in HALF_TYPES:
        return f"it computes in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}; set dtype"
    return None


def trtllm_misfit(page_size: int, kv_dtype: torch.dtype | None) -> str | None:
    """Return why TensorRT-LLM's kernels, which FlashInfer brings for Blackwell GPUs, cannot read such pages; None
    if they can.
    """
    if kv_dtype not in (None, *HALF_TYPES):
        return "TensorRT-LLM's kernels support pages in fp8 only with queries in fp8"
    if page_size not in _TRTLLM_PAGES:
        sizes = ", ".join(map(str, _TRTLLM_PAGES))
        return f"TensorRT-LLM's kernels support pages of {sizes} tokens, not of {page_size}; set page_size"
    return None


def _text(error: Exception) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return f"it does not import: {said}; reinstall it for torch {torch.__version__}"
