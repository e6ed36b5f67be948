"""Launches kernels: on the device of their tensors, whichever device the thread is on.

Within `compiling` launches only compile, all kernels beside each other: what a model needs is compiled before its
first step, and Triton keeps it on disk (TRITON_CACHE_DIR) for the next start.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import triton

_MAX_COMPILERS = 16
_is_compiling: ContextVar[bool] = ContextVar("is_compiling", default=False)


def launch(kernel: Any, grid: tuple[int, ...], first: torch.Tensor, *args: Any, **options: Any) -> None:
    """Launch `kernel` with `first`, a tensor on the device that all others are on, and the other arguments."""
    device = first.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel.run(first, *args, grid=grid, warmup=_is_compiling.get(), **options)
    else:
        kernel.run(first, *args, grid=grid, warmup=_is_compiling.get(), **options)


@contextmanager
def compiling() -> Iterator[None]:
    """Have this thread's launches compile their kernels and not run them. On leaving, all of them are compiled.

    Raises what a compiler raised. Early versions of Triton compile one kernel after the other.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    token = _is_compiling.set(True)
    try:
        with (
            ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_COMPILERS)) as compilers,
            nullcontext() if mode is None else mode(compilers),
        ):
            yield
    finally:
        _is_compiling.reset(token)
