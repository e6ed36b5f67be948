"""Attention to prompts by each way that there is: pages of several sizes, other backends, FlashAttention-3.

A first call is timed in this thread and in another one, because cuDNN plans anew in each thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu_sections.attention_cases import Case, make_case
from benchmarks.gpu_sections.foreign_kernels import flash_attention_3
from benchmarks.gpu_sections.kernel_speed import KernelSpeed
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.timing import synchronize
from engine.attention.base import consider

_FA3 = "fa3"
_WAYS = (("triton", 16), ("triton", 64), ("triton", 128), ("cudnn", 16), ("flash_attn", 16), ("flashinfer", 16))
"""Backends, and the sizes of their pages. Pages of 64 and more are read by TMA on GPUs that have it."""
_MOST_PAIRS = 2**23
"""Queries times positions for which attention is also written out in float32."""
_MOST_ERROR = 0.04
Call = Callable[[], torch.Tensor]


class Prompts(NamedTuple):
    """What is timed."""

    batches: tuple[tuple[int, int, int], ...]
    """Rows, positions before, tokens of the step."""


FULL = Prompts(
    (
        (8, 0, 1024),
        (1, 0, 512),
        (1, 0, 1024),
        (1, 0, 2048),
        (1, 0, 8192),
        (1, 30_720, 2048),
        (1, 28_672, 4096),
        (4, 2048, 512),
    )
)
TINY = Prompts(((2, 0, 20), (1, 70, 5)))


class PromptSpeed(KernelSpeed):
    """On one device."""

    def prompts(self, prompts: Prompts) -> Iterator[Measurement]:
        """Yield a line for each way and batch."""
        ways: list[tuple[str, int]] = [*_WAYS, (_FA3, 16)]
        for by, page_size in ways:
            make = self._way(by, page_size)
            name = by if page_size == 16 else f"{by}, pages of {page_size}"
            if isinstance(make, str):
                yield Measurement("prompt", by=name, note=f"left out: {make}")
                continue
            for rows, start, new in prompts.batches:
                yield self._prompt(name, make, page_size, (rows, start, new))

    def _way(self, by: str, page_size: int) -> Callable[[Case], Call] | str:
        """Return the function that computes a case, or the reason why there is none."""
        if by == _FA3:
            return flash_attention_3
        shape = replace(self._shape, page_size=page_size)
        [(_, backend)] = consider(shape, torch.bfloat16, self._device, by)
        if isinstance(backend, str):
            return backend
        made = backend(shape)
        return lambda case: partial(made.prepare(case.batch, case.null_page).attend, *case[2:])

    def _prompt(
        self, name: str, make: Callable[[Case], Call], page_size: int, batch: tuple[int, int, int]
    ) -> Measurement:
        rows, start, new = batch
        what = f"prompt, {rows} x {new}" + (f" after {start}" if start else "")
        shape = replace(self._shape, page_size=page_size)
        new_case = partial(make_case, [(start, new)] * rows, shape, None, torch.bfloat16, self._device)
        case = new_case()
        try:
            firsts = [self._first_call(make, case), self._first_call_elsewhere(make, case)]
            error = None
            if new * (start + new) <= _MOST_PAIRS:
                error = float((make(case)().float() - case.expected()).abs().nan_to_num(nan=torch.inf).max())
        except ImportError as missing:
            return Measurement(what, by=name, note=f"left out: {missing}")
        except Exception as failure:
            return Measurement(what, by=name, note=f"failed: {type(failure).__name__}: {str(failure)[:200]}")
        del case
        line = self._timed(what, name, lambda: make(new_case()), *self._work(shape, rows, start, new))
        said = f"first call {1000 * firsts[0]:.2f} ms, in another thread {1000 * firsts[1]:.2f} ms"
        note = "; ".join(part for part in (line.note, said) if part)
        return replace(line, passed=None if error is None else error <= _MOST_ERROR, error=error, note=note)

    def _first_call(self, make: Callable[[Case], Call], case: Case) -> float:
        """Return the seconds of a call, preparation included."""
        synchronize(self._device)
        began = time.perf_counter()
        make(case)()
        synchronize(self._device)
        return time.perf_counter() - began

    def _first_call_elsewhere(self, make: Callable[[Case], Call], case: Case) -> float:
        """Return the seconds of the first call in a new thread; 0 if it failed, as only a later one then tells."""
        found: list[float] = []
        thread = threading.Thread(target=lambda: found.append(self._first_call(make, case)))
        thread.start()
        thread.join()
        return found[0] if found else 0.0
