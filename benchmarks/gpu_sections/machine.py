"""Which machine this is, and how fast it reads, copies and multiplies."""

from __future__ import annotations

import platform
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.gpu_sections.limits import Rates
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.timing import recorded_seconds_of

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


def measured_rates(device: torch.device, dtype: torch.dtype) -> tuple[Rates, list[Measurement]]:
    """Return the machine's rates, and a line for each: reads of far more than any cache holds, copies of it, and
    products of large square matrices. The limit of reads is what a sum reaches, or a copy if that is faster.
    """
    is_gpu = device.type == "cuda"
    copied = min(_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4) if is_gpu else 32 << 20
    source = torch.ones(copied // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = 2 * copied / recorded_seconds_of([partial(target.copy_, source)], device)
    read = copied / recorded_seconds_of([source.sum], device)
    del source, target
    matmul = max(_matmul(n, device, dtype) for n in (_MATRICES if is_gpu else (512,)))
    return Rates(max(read, copy), matmul), [
        Measurement("read bandwidth", by="torch", note=f"{read / 1e12:.3f} TB/s"),
        Measurement("copy bandwidth", by="torch", note=f"{copy / 1e12:.3f} TB/s, read and written"),
        Measurement("matmul rate", by="torch", note=f"{matmul / 1e12:.1f} TFLOP/s"),
    ]


def _matmul(size: int, device: torch.device, dtype: torch.dtype) -> float:
    # Random numbers: of zeros, which cost no power, products are faster than any model's.
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / recorded_seconds_of([lambda: left @ right.T], device)
