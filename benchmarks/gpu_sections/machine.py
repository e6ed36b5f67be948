"""Which machine this is, and how fast it copies and multiplies."""

from __future__ import annotations

import platform
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.gpu_sections.limits import Rates
from benchmarks.gpu_sections.timing import seconds_of

_PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy", "flashinfer-python", "flash-attn")
_COPY_BYTES = 4 << 30
_MATRICES = (8192, 16_384)


def facts(device: torch.device) -> dict[str, Any]:
    """Names, sizes and versions."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if device.type != "cuda":
        return {"name": f"CPU {platform.machine()}", "memory_gib": None, **found}
    gpu = torch.cuda.get_device_properties(device)
    return {
        "name": gpu.name,
        "memory_gib": round(gpu.total_memory / 2**30, 1),
        "capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "cuda": torch.version.cuda or torch.version.hip,
        "driver": _driver(),
        **found,
    }


def _driver() -> str:
    """The kernel module's version, as Linux tells it."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The best of several tries: a copy far larger than any cache, and products of large square matrices."""
    is_gpu = device.type == "cuda"
    copied = min(_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4) if is_gpu else 32 << 20
    source = torch.ones(copied // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * copied / seconds_of(partial(target.copy_, source), device)
    return Rates(bandwidth, max(_matmul(n, device, dtype) for n in (_MATRICES if is_gpu else (512,))))


def _matmul(size: int, device: torch.device, dtype: torch.dtype) -> float:
    # Random numbers: of zeros, which cost no power, products are faster than any model's.
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right.T, device)
