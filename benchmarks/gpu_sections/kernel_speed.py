"""Kernels alone, beside the memory's bandwidth or the matrix units' rate: every attention backend that imports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.gpu_sections.attention_cases import make_case
from benchmarks.gpu_sections.limits import Rates
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.timing import seconds_of
from engine.attention.base import AttentionShape, consider


class _Batch(NamedTuple):
    rows: int
    start: int
    new: int

    def __str__(self) -> str:
        if self.new == 1:
            return f"decode, {self.rows} x {self.start + 1}"
        return f"extend, {self.rows} x {self.new}" + (f" after {self.start}" if self.start else "")


_BATCHES = (
    _Batch(1, 1023, 1),
    _Batch(8, 4095, 1),
    _Batch(32, 1023, 1),
    _Batch(64, 4095, 1),
    _Batch(256, 1023, 1),
    _Batch(8, 0, 1024),
    _Batch(1, 0, 8192),
    _Batch(1, 28_672, 4096),
)
_TINY_BATCHES = (_Batch(2, 30, 1), _Batch(1, 0, 20))
_HEADS = (32, 8, 128)
_TINY_HEADS = (4, 2, 32)
_ELEMENT_BYTES = 2


def kernel_speed(device: torch.device, rates: Rates, is_tiny: bool) -> Iterator[Measurement]:
    """Attention of one layer of Llama-3.1-8B, pages of 16."""
    shape = AttentionShape(*(_TINY_HEADS if is_tiny else _HEADS), 16, frozenset({None}))
    for batch in _TINY_BATCHES if is_tiny else _BATCHES:
        case = make_case([(batch.start, batch.new)] * batch.rows, shape, None, torch.bfloat16, device)
        limit = _limit(batch, shape, rates)
        for name, backend in consider(shape, torch.bfloat16, device):
            if isinstance(backend, str):
                if batch is _BATCHES[0]:
                    yield Measurement("attention", by=name, note=f"left out: {backend}")
                continue
            step = backend(shape).prepare(case.batch, case.null_page)
            seconds = seconds_of(lambda: step.attend(case.pages, case.query, None), device)  # noqa: B023
            share = limit / seconds
            yield Measurement(f"attention, {batch}", by=name, ms=1000 * seconds, limit_share=share)


def _limit(batch: _Batch, shape: AttentionShape, rates: Rates) -> float:
    """Seconds to read the KV, or to multiply with it."""
    end = batch.start + batch.new
    kv_bytes = 2 * batch.rows * end * shape.num_kv_heads * shape.head_dim * _ELEMENT_BYTES
    pairs = batch.rows * (end * (end + 1) - batch.start * (batch.start + 1)) / 2
    return max(kv_bytes / rates.bandwidth, 4 * pairs * shape.num_heads * shape.head_dim / rates.matmul)
