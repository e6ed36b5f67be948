"""Kernels alone, beside the memory's bandwidth or the matrix units' rate: every attention backend that imports.

They are timed inside CUDA graphs, on buffers that the cache does not hold. All of the sampler is timed, as a step
calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu_sections.attention_cases import make_case
from benchmarks.gpu_sections.limits import Rates
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.timing import num_copies, recorded_seconds_of, seconds_of
from cache import Namespace
from engine.attention.base import AttentionBackend, AttentionShape, AttentionStep, consider
from engine.attention.expanded import MOST_ABSORBED, ExpandedStep, ExpandingAttention, HeadsQuery
from engine.layers.operations import Rotary
from engine.model_parts.rope import RopeConfig
from engine.models.select_operations import operations_for
from engine.sampling.sampler import sampler_for
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from engine.values.sampling_row import SamplingRow

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
    latent: Latent


class Latent(NamedTuple):
    """Attention over latent KV."""

    num_heads: tuple[int, ...]
    rank: int
    rope_dim: int
    plain_dim: int
    """Numbers of a head's value, too, if KV is expanded."""
    batches: tuple[tuple[int, int, int], ...]


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
        (1, 8192, 64),
        (1, 28_672, 4096),
    ),
    (1, 256, 8192),
    4096,
    14_336,
    256,
    128_256,
    Latent((16, 128), 512, 64, 128, ((1, 4095, 1), (32, 4095, 1), (128, 4095, 1), (1, 0, 4096))),
)
"""A layer of Llama-3.1-8B, and the attention of DeepSeek-V2-Lite (or a rank of eight of V3) and of V3."""
TINY = Sizes(
    (4, 2, 32), ((2, 30, 1), (1, 0, 20)), (3,), 64, 96, 4, 300, Latent((4,), 32, 16, 24, ((2, 30, 1), (1, 0, 520)))
)


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
                yield self._timed(
                    f"attention, {rows} x {new} after {start}",
                    name,
                    partial(self._attention, backend(self._shape), self._shape, rows, start, new),
                    *self._work(self._shape, rows, start, new),
                )

    def latent_attention(self) -> Iterator[Measurement]:
        """Time one layer over latent KV: by our kernels, decodes by plain torch too, and prompts whose KV torch
        expands.
        """
        sizes = self._sizes.latent
        for num_heads in sizes.num_heads:
            shape = AttentionShape(
                num_heads, 1, sizes.rank + sizes.rope_dim, 64, frozenset({None}), latent=sizes.rank
            )
            for name, backend in consider(shape, _DTYPE, self._device):
                if isinstance(backend, str):
                    if name == "triton":
                        yield Measurement(f"latent attention, {num_heads} heads", by=name, note=backend)
                    continue
                for rows, start, new in sizes.batches:
                    what = f"latent attention, {num_heads} heads, {rows} x {new} after {start}"
                    if name == "triton" or new == 1:
                        make = partial(self._attention, backend(shape), shape, rows, start, new)
                        yield self._timed(what, name, make, *self._work(shape, rows, start, new))
                    if name == "triton" and new > MOST_ABSORBED:
                        yield self._timed(
                            what,
                            "torch, expanded",
                            partial(self._expanded, backend(shape), shape, rows, start, new),
                            *self._expanded_work(shape, rows, start, new),
                        )

    def _expanded(
        self, backend: AttentionBackend, shape: AttentionShape, rows: int, start: int, new: int
    ) -> Callable[[], object]:
        """One layer's call with its expansion, on pages of its own."""
        case, sizes = make_case([(start, new)] * rows, shape, None, _DTYPE, self._device), self._sizes.latent
        step = ExpandingAttention(backend, shape).prepare(case.batch, case.null_page)
        assert isinstance(step, ExpandedStep)
        tokens = rows * new, shape.num_heads
        query = HeadsQuery(self._random(*tokens, sizes.plain_dim), self._random(*tokens, sizes.rope_dim))
        expansion = self._random(shape.num_heads, 2 * sizes.plain_dim, sizes.rank)
        return partial(step.values, case.pages, query, expansion, case.scales, _no_other_rows)

    def _expanded_work(self, shape: AttentionShape, rows: int, start: int, new: int) -> tuple[float, float]:
        """Bytes of KV, and operations with the expansion, of rows whose KV is expanded."""
        num_bytes, absorbed = self._work(shape, rows, start, new)
        sizes = self._sizes.latent
        attended = absorbed * (2 * sizes.plain_dim + sizes.rope_dim) / (shape.head_dim + shape.value_dim)
        expanded = 2 * rows * (start + new) * shape.num_heads * 2 * sizes.plain_dim * sizes.rank
        return num_bytes, attended + expanded

    def _attention(
        self, backend: AttentionBackend, shape: AttentionShape, rows: int, start: int, new: int
    ) -> Callable[[], object]:
        """One layer's call, on pages of its own."""
        case = make_case([(start, new)] * rows, shape, None, _DTYPE, self._device)
        return partial(backend.prepare(case.batch, case.null_page).attend, *case[2:])

    def _work(self, shape: AttentionShape, rows: int, start: int, new: int) -> tuple[float, float]:
        """Bytes of keys and values, and operations, of rows that attend to what is before them."""
        end, value_dim = start + new, shape.value_dim
        pairs = (end * (end + 1) - start * (start + 1)) / 2
        numbers = shape.num_kv_heads * (shape.head_dim + (value_dim if shape.latent is None else 0))
        operations = 2 * rows * pairs * shape.num_heads * (shape.head_dim + value_dim)
        return rows * end * numbers * _DTYPE.itemsize, operations

    def operations(self) -> Iterator[Measurement]:
        """What a layer computes beside attention and products: bytes that are read and written."""
        for tokens in self._sizes.tokens:
            for what, make, numbers in self._makers(tokens):
                num_bytes = tokens * numbers * _DTYPE.itemsize
                yield self._timed(f"{what}, {tokens} tokens", "raydix", make, num_bytes)

    def _makers(self, tokens: int) -> Iterator[tuple[str, Callable[[], Callable[[], object]], int]]:
        """Each operation's name, what makes a call of it on new buffers, and its numbers per token."""
        sizes, shape = self._sizes, self._shape
        case = make_case([(0, tokens)], shape, None, _DTYPE, self._device)
        ours = operations_for(Rotary.of([RopeConfig(5e5)], shape.head_dim, _DTYPE, self._device))(case.batch)
        weight = torch.ones(sizes.hidden, dtype=_DTYPE, device=self._device)
        num_heads = shape.num_heads + 2 * shape.num_kv_heads
        random = partial(self._random, tokens)
        yield (
            "add, norm",
            lambda: partial(ours.add_norm, random(sizes.hidden), random(sizes.hidden), weight, 1e-5),
            4 * sizes.hidden,
        )
        yield (
            "rotate, store",
            lambda: partial(ours.rotate_into, case.pages, random(num_heads, shape.head_dim), 0, None, 0.0),
            2 * num_heads * shape.head_dim,
        )
        yield "silu, multiply", lambda: partial(ours.silu_mul, random(2 * sizes.inner)), 3 * sizes.inner

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
            seconds = seconds_of(partial(sampler.sample, logits, rows), self._device)
            shares = self._rates.shares(lambda rates: rates.least(logits.nbytes), seconds)
            yield Measurement(what, ms=1000 * seconds, **shares, note="with the host")

    def _timed(
        self,
        what: str,
        by: str,
        make: Callable[[], Callable[[], object]],
        num_bytes: float,
        operations: float = 0.0,
    ) -> Measurement:
        """A call, and the share of it that the machine needs for so many bytes and operations.

        make: returns the call, on new buffers
        """
        note = ""
        try:
            calls = [make() for _ in range(num_copies(num_bytes, self._device))]
            try:
                seconds = recorded_seconds_of(calls, self._device)
            except RuntimeError as error:
                note = f"with the host, not recorded: {str(error)[:80]}"
                seconds = seconds_of(calls[0], self._device)
        except Exception as error:
            return Measurement(what, by=by, note=f"failed: {type(error).__name__}: {str(error)[:200]}")
        shares = self._rates.shares(lambda rates: rates.least(num_bytes, operations), seconds)
        return Measurement(what, by=by, ms=1000 * seconds, **shares, note=note)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._device).to(_DTYPE)


def _no_other_rows(step: AttentionStep, query: HeadsQuery) -> torch.Tensor:
    raise AssertionError("all rows have many tokens")
