"""Kernels alone, beside the memory's bandwidth or the matrix units' rate: every attention backend that imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu_sections.attention_cases import make_case
from benchmarks.gpu_sections.limits import Rates
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.timing import seconds_of
from cache import Namespace
from engine.attention.base import AttentionShape, consider
from engine.models.operations import Rotary
from engine.models.rope import RopeConfig
from engine.models.select_operations import operations_for
from engine.request import Request
from engine.sampling.row import SamplingRow
from engine.sampling.sampler import sampler_for
from engine.sampling_params import SamplingParams

_DTYPE = torch.bfloat16


class Sizes(NamedTuple):
    """Sizes of the timed shapes."""

    heads: tuple[int, int, int]
    batches: tuple[tuple[int, int, int], ...]
    """Attention: rows, positions before, tokens of the step."""
    tokens: tuple[int, ...]
    """Tokens of a step, for all other operations."""
    hidden: int
    inner: int
    rows: int
    vocab: int


FULL = Sizes(
    (32, 8, 128),
    (
        (1, 1023, 1),
        (8, 4095, 1),
        (32, 1023, 1),
        (64, 4095, 1),
        (256, 1023, 1),
        (8, 0, 1024),
        (1, 0, 8192),
        (1, 28_672, 4096),
    ),
    (1, 256, 8192),
    4096,
    14_336,
    256,
    128_256,
)
"""A layer of Llama-3.1-8B."""
TINY = Sizes((4, 2, 32), ((2, 30, 1), (1, 0, 20)), (3,), 64, 96, 4, 300)


class KernelSpeed:
    """On one device."""

    def __init__(self, device: torch.device, rates: Rates, sizes: Sizes) -> None:
        self._device, self._rates, self._sizes = device, rates, sizes
        self._shape = AttentionShape(*sizes.heads, 16, frozenset({None}))

    def attention(self) -> Iterator[Measurement]:
        """Time one layer, in pages of 16; the work that a step does once for all layers is not counted."""
        for name, backend in consider(self._shape, _DTYPE, self._device):
            if isinstance(backend, str):
                yield Measurement("attention", by=name, note=f"left out: {backend}")
                continue
            for rows, start, new in self._sizes.batches:
                case = make_case([(start, new)] * rows, self._shape, None, _DTYPE, self._device)
                call = partial(backend(self._shape).prepare(case.batch, case.null_page).attend, *case[2:])
                yield self._timed(
                    f"attention, {rows} x {new} after {start}", name, call, *self._work(rows, start, new)
                )

    def _work(self, rows: int, start: int, new: int) -> tuple[float, float]:
        """Bytes of keys and values, and operations, of rows that attend to what is before them."""
        end, (num_heads, num_kv_heads, head_dim) = start + new, self._sizes.heads
        pairs = (end * (end + 1) - start * (start + 1)) / 2
        num_bytes = 2 * rows * end * num_kv_heads * head_dim * _DTYPE.itemsize
        return num_bytes, 4 * rows * pairs * num_heads * head_dim

    def operations(self) -> Iterator[Measurement]:
        """What a layer computes beside attention and products: bytes that are read and written."""
        sizes, shape = self._sizes, self._shape
        rotary = Rotary.of(RopeConfig(5e5), shape.head_dim, _DTYPE, self._device)
        make = operations_for(rotary)
        weight = torch.ones(sizes.hidden, dtype=_DTYPE, device=self._device)
        for tokens in sizes.tokens:
            case = make_case([(0, tokens)], shape, None, _DTYPE, self._device)
            ours = make(case.batch)
            x, branch = self._random(tokens, sizes.hidden), self._random(tokens, sizes.hidden)
            gate_up = self._random(tokens, 2 * sizes.inner)
            heads = self._random(tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
            added = partial(ours.add_norm, x, branch, weight, 1e-5)
            rotated = partial(ours.rotate_into, case.pages, heads, None, 0.0)
            yield self._timed(f"add, norm, {tokens} tokens", "raydix", added, 4 * x.nbytes)
            yield self._timed(f"rotate, store, {tokens} tokens", "raydix", rotated, 2 * heads.nbytes)
            silu = partial(ours.silu_mul, gate_up)
            yield self._timed(f"silu, multiply, {tokens} tokens", "raydix", silu, gate_up.nbytes * 3 // 2)

    def sampler(self) -> Iterator[Measurement]:
        """All of it, as a step calls it: from logits that are read at least once to tokens."""
        sizes = self._sizes
        sampler = sampler_for((), self._device)
        logits = self._random(sizes.rows, sizes.vocab).float()
        for name, params in (
            ("greedy", SamplingParams(temperature=0.0)),
            ("temperature", SamplingParams(temperature=0.6)),
            ("top-p", SamplingParams(temperature=0.6, top_p=0.95)),
        ):
            rows = [
                SamplingRow.of(
                    Request.make(f"r{at}", [0], params, arrival=0.0, seed=at, namespace=Namespace("speed"))
                )
                for at in range(sizes.rows)
            ]
            what = f"sampler, {sizes.rows} rows of {sizes.vocab}, {name}"
            yield self._timed(what, "raydix", partial(sampler.sample, logits, rows), logits.nbytes)

    def _timed(
        self, what: str, by: str, call: Callable[[], object], num_bytes: float, operations: float = 0.0
    ) -> Measurement:
        """A call, and the share of it that the machine needs for so many bytes and operations."""
        try:
            seconds = seconds_of(call, self._device)
        except Exception as error:
            return Measurement(what, by=by, note=f"failed: {type(error).__name__}: {str(error)[:200]}")
        limit = max(num_bytes / self._rates.bandwidth, operations / self._rates.matmul)
        return Measurement(what, by=by, ms=1000 * seconds, limit_share=limit / seconds)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._device).to(_DTYPE)
