"""The machine's limits: how fast it reads memory, and how fast it multiplies matrices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.peers.models import matrix_parameters, prefill_flops
from benchmarks.peers.protocol import Job, Precision

_READ_BYTES = 2**29
_GEMM = 2048
_TRIES = 10


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes per second, and floating-point operations per second."""

    read: float
    gemm: float

    def best(self, other: Ceilings) -> Ceilings:
        return Ceilings(max(self.read, other.read), max(self.gemm, other.gemm))


NOTHING = Ceilings(0.0, 0.0)
"""Ceilings before any measurement."""


def measure(precision: Precision, threads: int) -> Ceilings:
    """The best of a few tries: a sum over memory far larger than the caches, and a product of square matrices."""
    torch.set_num_threads(threads)
    memory = torch.ones(_READ_BYTES // 4, dtype=torch.float32)
    left = torch.randn(_GEMM, _GEMM).to(getattr(torch, precision))
    right = left.clone()
    with torch.inference_mode():
        return Ceilings(
            read=_READ_BYTES / _fastest(lambda: memory.sum()),
            gemm=2 * _GEMM**3 / _fastest(lambda: left @ right.T),
        )


def _fastest(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TRIES + 1):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def decode_share(config: dict[str, Any], width: int, tokens_per_s: float, ceilings: Ceilings) -> float:
    """How much of the read bandwidth a single stream's decoding takes: every token reads all matrices once.

    `width` is bytes per parameter.
    """
    return tokens_per_s * matrix_parameters(config) * width / ceilings.read


def prefill_share(config: dict[str, Any], job: Job, seconds: float, ceilings: Ceilings) -> float:
    """How much of the matrix peak computing the prompts of `job` takes."""
    return prefill_flops(config, [len(prompt) for prompt in job.prompts]) / seconds / ceilings.gemm
