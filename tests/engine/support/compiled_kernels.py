"""Kernels compiled for a GPU that is not there, by our own launches of them.

Use it in a process of its own, in which Triton is not set to interpret: see compile_triton.py.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.kernels.triton import expert_products, grouped_gemm, launch_config
from engine.kernels.triton import launch as launch_module
from engine.kernels.triton.launch import compiling

SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227}
"""What a program may have, by compute capability: T4, A100, A10 and RTX 30, L4 and RTX 40, H100, B200."""


_ALIKE = {
    "expert_tiles._count",
    "expert_tiles._place",
    "grouped_gemm._combine",
    "work_list._build",
}
"""Kernels beside others, without products or numbers of eight bits: how they are launched is all that differs."""


def name_of(kernel: JITFunction) -> str:
    """Return the kernel's name behind its module's."""
    return f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"


@contextmanager
def compiled(capability: int, known: set[tuple[str, bool]] | None = None) -> Iterator[list[dict[str, Any]]]:
    """Launches within compile their kernel for such a GPU, specialised by Triton as for it, and do not run it.
    Kernels that are alike everywhere are left out if they are in `known`, by whether they are launched early.

    Afterwards there is a report of each: the kernel, what it was launched with by name, the shared memory it takes
    and what the GPU has, in bytes, a thread's registers and what had no room in them, its instructions of tensor
    cores and whether it has any, whether it has copies by TMA, and whether it is launched before the kernel before
    it has ended, and waits for that. Triton stays set up for this GPU.
    """
    launches: list[dict[str, Any]] = []
    target, limit = GPUTarget("cuda", capability, 32), SHARED_KIB[capability] * 1024
    device = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: capability,  # Triton keeps what it compiled by it
        get_current_stream=lambda device: 0,
    )
    run = JITFunction.run
    launched: list[tuple[dict[str, Any], Any]] = []

    def compile_launched(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if known is not None and name_of(kernel) in _ALIKE:
            if (kind := (name_of(kernel), kwargs["PDL"])) in known:
                return
            known.add(kind)
        made = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        report = {"kernel": name_of(kernel), "capability": capability, "with": kwargs, "limit": limit}
        sizes = [arg.element_size() for arg in args[:2] if isinstance(arg, torch.Tensor)]
        launched.append((report | {"widens": sizes != sorted(sizes)}, made))

    driver.set_active(device)
    with (
        patch.object(JITFunction, "run", compile_launched),
        patch.object(launch_config, "shared_memory", lambda device: limit),
        patch.object(grouped_gemm, "shared_memory", lambda device: limit),
        patch.object(expert_products, "makes_fp8", lambda device: capability >= 89),
        patch.object(launch_module, "launches_early", lambda device: capability >= 90),
        compiling(),
    ):
        yield launches
    registers: dict[bytes, dict[str, int]] = {}
    for report, made_later in launched:
        made = made_later.result() if hasattr(made_later, "result") else made_later  # Triton 3.6 has no other way
        binary = made.asm["cubin"]
        registers[binary] = registers.get(binary) or _registers(binary)
        report |= {"shared": made.metadata.shared, "has_products": "mma" in made.asm["ptx"]}
        report |= {
            "products": sorted(set(_PRODUCTS.findall(made.asm["ptx"]))),
            "is_launched_early": made.metadata.launch_pdl,
            "waits": "griddepcontrol.wait" in made.asm["ptx"],
        }
        report["has_tma"] = "cp.async.bulk.tensor" in made.asm["ptx"]
        launches.append(report | registers[binary])


_PRODUCTS = re.compile(r"(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*")
"""Instructions of tensor cores in a kernel's assembly."""


def _registers(binary: bytes) -> dict[str, int]:
    """Return the registers of a thread, and the bytes of those that had no room, as the program says that Triton
    brings along.
    """
    program = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = subprocess.run(
            [program, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return {"registers": int(found[1]), "stack": int(found[2])}
