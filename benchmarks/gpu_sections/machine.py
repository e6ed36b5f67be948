"""Which machine this is, how fast it reads, copies and multiplies, and how fast its data sheet says it is."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.gpu_sections.limits import Rates
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.timing import recorded_seconds_of

_PACKAGES = (
    *("torch", "triton", "transformers", "safetensors", "numpy", "flashinfer-python", "flash-attn"),
    *("fa3-fwd", "sgl-deep-gemm", "fla-core"),
)
_SHEETS = Path(__file__).parents[2] / "deployments/simulator/planning/gpus.yaml"
_OTHER_CARDS = {"pcie", "nvl"}
"""In the names of cards that are slower than those of the data sheets."""
_READINGS = 3
"""Times that each rate is measured; the best counts."""
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
    products of large square matrices. The limit of reads is what a sum reaches, or a copy if that is faster. Each
    is the best of several readings, between which the clocks may change.
    """
    is_gpu = device.type == "cuda"
    copied = min(_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4) if is_gpu else 32 << 20
    source = torch.ones(copied // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    # By a kernel, as a model copies: in a graph, `copy_` is no kernel, and slower.
    copying = partial(torch.add, source, 0.0, out=target)
    sizes = _MATRICES if is_gpu else (512,)
    clocks = [_clocks()]
    read = [copied / recorded_seconds_of([source.sum], device) for _ in range(_READINGS)]
    copy = [2 * copied / recorded_seconds_of([copying], device) for _ in range(_READINGS)]
    del source, target, copying
    matmul = [max(_matmul(n, device, dtype) for n in sizes) for _ in range(_READINGS)]
    clocks.append(_clocks())
    bandwidth, operations = sheet_of(torch.cuda.get_device_name(device)) if is_gpu else (None, None)
    return Rates(max(*read, *copy), max(matmul), bandwidth, operations), [
        Measurement("read bandwidth", by="torch", note=f"{_listed(read, '.3f')} TB/s"),
        Measurement("copy bandwidth", by="torch", note=f"{_listed(copy, '.3f')} TB/s, read and written"),
        Measurement("matmul rate", by="torch", note=f"{_listed(matmul, '.1f')} TFLOP/s"),
        Measurement("clocks", by="driver", note=f"before {clocks[0]}; after {clocks[1]}"),
    ]


def _listed(rates: Sequence[float], form: str) -> str:
    """Return rates in 10^12 per second, the best first."""
    return ", ".join(format(rate / 1e12, form) for rate in sorted(rates, reverse=True))


def sheet_of(name: str) -> tuple[float | None, float | None]:
    """Return the bandwidth and the matrix rate by the data sheet of a GPU with this name; None if not known."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if not words & _OTHER_CARDS:
        for key, sheet in yaml.safe_load(_SHEETS.read_text("utf-8")).items():
            kind, _, memory = key.partition("-")
            if kind in words and (not memory or f"{memory}gb" in words):
                return 1e9 * sheet["bandwidth_gb_s"], 1e12 * sheet["bf16_tflops"]
    return None, None


def _clocks() -> str:
    """Return clocks, power and temperature of the first GPU, by NVIDIA's tool."""
    asked = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={asked}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "not known"


def _matmul(size: int, device: torch.device, dtype: torch.dtype) -> float:
    # Random numbers: of zeros, which cost no power, products are faster than any model's.
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / recorded_seconds_of([lambda: left @ right.T], device)
