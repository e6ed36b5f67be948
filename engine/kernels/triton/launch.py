"""Launches kernels: on the device of their tensors, whichever device the thread is on.

Within `compiling` launches only compile, all kernels beside each other: what a model needs is compiled before its
first step, and Triton keeps it on disk (TRITON_CACHE_DIR) for the next start.

A kernel that takes `PDL` is launched while the kernel before it is still running, where the GPU and Triton can do
that (programmatic dependent launch), and waits for it itself (`engine.kernels.triton.tile.start`).
"""

from __future__ import annotations

import ast
import functools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

_MAX_COMPILERS = 16
_PDL_CAPABILITY = (9, 0)
"""Compute capability from which a kernel may be launched before the one before it has ended."""
_is_compiling: ContextVar[bool] = ContextVar("is_compiling", default=False)


def launch(kernel: Any, grid: tuple[int, ...], first: torch.Tensor, *args: Any, **options: Any) -> None:
    """Launch `kernel` with `first`, a tensor on the device that all others are on, and the other arguments."""
    device = first.device
    if "PDL" in getattr(kernel, "arg_names", ()):
        options["PDL"] = launches_early(device)
        if options["PDL"]:
            options["launch_pdl"] = True
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel.run(first, *args, grid=grid, warmup=_is_compiling.get(), **options)
    else:
        kernel.run(first, *args, grid=grid, warmup=_is_compiling.get(), **options)


def empty_indices(device: torch.device, *shape: int) -> torch.Tensor:
    """Return int64 memory for numbers that later operations index with. It is zero where kernels only compile and
    so write nothing: a GPU ends a process's work when an index is out of bounds.
    """
    make = torch.zeros if _is_compiling.get() else torch.empty
    return make(shape, dtype=torch.int64, device=device)


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Whether kernels may be launched on a device before those before them have ended."""
    if (
        device.type != "cuda"
        or torch.version.hip is not None
        or find_spec("triton.language.extra.cuda.gdc") is None
    ):
        return False
    return torch.cuda.get_device_capability(device) >= _PDL_CAPABILITY


@contextmanager
def compiling() -> Iterator[None]:
    """Have this thread's launches compile their kernels and not run them. On leaving, all of them are compiled.

    Raises what a compiler raised. Early versions of Triton compile one kernel after the other.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    token = _is_compiling.set(True)
    try:
        with (
            _parsed_in_turn(),
            ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_COMPILERS)) as compilers,
            nullcontext() if mode is None else mode(compilers),
        ):
            yield
    finally:
        _is_compiling.reset(token)


@contextmanager
def _parsed_in_turn() -> Iterator[None]:
    """Have one thread at a time parse kernels, as each compiler does.

    Python 3.11 counts how deep `ast.parse` is for all threads together. When it collects garbage, another thread
    may come between, and one of them raises SystemError, "AST constructor recursion depth mismatch"
    (python/cpython#106905).
    """
    parse, turn = JITFunction.parse, threading.Lock()

    def parse_alone(kernel: JITFunction[Any]) -> ast.Module:
        with turn:
            tree: ast.Module = parse(kernel)
        return tree

    JITFunction.parse = parse_alone
    try:
        yield
    finally:
        JITFunction.parse = parse
