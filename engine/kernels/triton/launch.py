"""Launches kernels on the device of their tensors, even if it is not the thread's current one.

Within `compiling`, launches only compile, all kernels in parallel: a model's kernels are compiled before its first
step, and Triton keeps them on disk (TRITON_CACHE_DIR) for the next start.

At each launch, Triton searches for the variant of a kernel that the arguments need, which takes longer than the
launch itself. So variants are kept here under all that they depend on, and launched without this search.

A kernel with the argument `PDL` is launched while the previous kernel still runs, if the GPU and Triton support it
(programmatic dependent launch), and waits for it itself (`engine.kernels.triton.tile.start`).
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
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_MAX_COMPILERS = 16
_PDL_CAPABILITY = (9, 0)
"""Compute capability from which a kernel may be launched before the previous one has ended."""
_is_compiling: ContextVar[bool] = ContextVar("is_compiling", default=False)


def launch(kernel: Any, grid: tuple[int, ...], first: torch.Tensor, *args: Any, **options: Any) -> None:
    """Launch `kernel` with `first`, a tensor on the device of all others, and the other arguments."""
    device = first.device
    if "PDL" in getattr(kernel, "arg_names", ()):
        options["PDL"] = launches_early(device)
        if options["PDL"]:
            options["launch_pdl"] = True
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch_here(kernel, grid, (first, *args), options)
    else:
        _launch_here(kernel, grid, (first, *args), options)


def _launch_here(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    is_compiling = _is_compiling.get()
    if is_compiling or not isinstance(kernel, JITFunction):
        kernel.run(*args, grid=grid, warmup=is_compiling, **options)
        return
    variant = (id(kernel), args[0].device, *map(_kind_of, args), *options, *options.values())
    kept = _variants.get(variant)
    if kept is not None:
        constants = (options[name] for name in kernel.arg_names[len(args) :])
        kept[1][(*grid, 1, 1)[:3]](*args, *constants)
        return
    made = kernel.run(*args, grid=grid, warmup=False, **options)
    if isinstance(made, CompiledKernel) and _is_told_by_kinds(kernel, args):
        _variants[variant] = kernel, made


_variants: dict[tuple[Any, ...], tuple[Any, CompiledKernel]] = {}
"""Kernels with their compiled variants. A kernel's address identifies it as long as it lives."""


def _is_told_by_kinds(kernel: JITFunction[Any], args: tuple[Any, ...]) -> bool:
    """Whether a variant depends only on the kinds of `args`, and all constants have names."""
    is_constant = [param.is_constexpr for param in kernel.params]
    are_named = is_constant == [at >= len(args) for at in range(len(is_constant))]
    return are_named and not any(_kind_of(arg) is object for arg in args)


def _kind_of(arg: Any) -> object:
    """Return the properties on which a variant may depend: for integers whether they are 1, a multiple of 16, and
    of 32 bits; for tensors their type and whether they begin at a multiple of 16 bytes; `object` for other values.
    """
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16
    if arg is None:
        return None
    if type(arg) is int:
        return (arg == 1) + 2 * (arg % 16 == 0) + 4 * (-(2**31) <= arg < 2**31)
    return float if type(arg) is float else object


def empty_indices(device: torch.device, *shape: int) -> torch.Tensor:
    """Return int64 memory for numbers that later operations index with. It is zero if kernels only compile and so
    write nothing, because an index out of bounds would abort the process's work on the GPU.
    """
    make = torch.zeros if _is_compiling.get() else torch.empty
    return make(shape, dtype=torch.int64, device=device)


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Whether kernels may be launched on a device before the previous ones have ended."""
    if (
        device.type != "cuda"
        or torch.version.hip is not None
        or find_spec("triton.language.extra.cuda.gdc") is None
    ):
        return False
    return torch.cuda.get_device_capability(device) >= _PDL_CAPABILITY


@contextmanager
def compiling() -> Iterator[None]:
    """Make this thread's launches only compile their kernels. On leaving, all of them are compiled.

    Raises the error of a compiler. Early versions of Triton compile kernels in turn.
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
    """Let only one thread at a time parse kernels, as each compiler does.

    Python 3.11 counts the depth of `ast.parse` for all threads together. If it collects garbage meanwhile, another
    thread may interfere, and one of them raises SystemError, "AST constructor recursion depth mismatch"
    (python/cpython#106905).
    """
    parse, turn = JITFunction.parse, threading.Lock()

    def parse_in_turn(kernel: JITFunction[Any]) -> ast.Module:
        with turn:
            tree: ast.Module = parse(kernel)
        return tree

    JITFunction.parse = parse_in_turn
    try:
        yield
    finally:
        JITFunction.parse = parse
