"""Batches over scattered pages of random KV, as checks and timings of attention need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cache import Namespace
from engine.attention.base import AttentionShape
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import FP8, UNSCALED, KVScales
from engine.attention.pinned import to_device
from engine.values.plan import Chunk
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams

_SCALES: KVScales = (0.5, 0.25)
"""Scales of pages in eight bits."""


class Case(NamedTuple):
    """One layer's attention."""

    shape: AttentionShape
    batch: AttentionBatch
    pages: torch.Tensor
    """[2, num_pages + 1, page_size, num_kv_heads, head_dim]; [1, ...] of latent KV"""
    query: torch.Tensor
    """[N, num_heads, head_dim]"""
    window: int | None
    scales: KVScales

    @property
    def null_page(self) -> int:
        """The last one, all zeros."""
        return self.pages.shape[1] - 1

    def expected(self) -> torch.Tensor:
        """float32 [N, num_heads * value_dim]: attention written out, row by row."""
        out, at = [], 0
        scales = torch.tensor(self.scales[: len(self.pages)], device=self.pages.device)
        pages = self.pages.float() * scales.view(-1, 1, 1, 1, 1)
        for row, (end, length) in enumerate(zip(self.batch.kv_lens_host, self.batch.query_lens, strict=True)):
            query = self.query[at : at + length].float().transpose(0, 1)
            at += length
            table = self.batch.block_table[row, : -(-end // self.shape.page_size)].long()
            parts = pages[:, table].flatten(1, 2)[:, :end]
            out.append(self._row(query, parts[0], parts[-1][..., : self.shape.value_dim]))
        return torch.cat(out)

    def _row(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        group = self.shape.num_heads // self.shape.num_kv_heads
        keys, values = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (keys, values))
        positions = torch.arange(keys.shape[1], device=keys.device)
        queries = positions[-query.shape[1] :, None]
        seen = (positions <= queries) & (positions > queries - (self.window or len(positions)))
        scores = (query @ keys.transpose(1, 2) * self.shape.scale).masked_fill(~seen, -torch.inf)
        attended: torch.Tensor = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
        return attended


def make_case(
    rows: Sequence[tuple[int, int]],
    shape: AttentionShape,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    """Rows of (positions before, tokens of the step), single tokens first; pages in random order."""
    generator = torch.Generator(device).manual_seed(0)
    counts = [-(-(start + length) // shape.page_size) for start, length in rows]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    parts = 2 if shape.latent is None else 1
    size = (parts, sum(counts) + 1, shape.page_size, shape.num_kv_heads, shape.head_dim)
    pages = torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)
    pages[:, -1] = 0
    is_fp8 = shape.kv_dtype == FP8
    chunks, at = [], 0
    for (start, length), num_pages in zip(rows, counts, strict=True):
        chunks.append(Chunk(_request(), start, length, [0] * length, order[at : at + num_pages], samples=True))
        at += num_pages
    batch = to_device(AttentionBatch.from_chunks(chunks, shape.page_size, sum(counts)), device)
    num_tokens = sum(length for _, length in rows)
    query = torch.empty(num_tokens, shape.num_heads, shape.head_dim, dtype=dtype, device=device)
    query.normal_(generator=generator)
    return Case(shape, batch, pages.to(FP8) if is_fp8 else pages, query, window, _SCALES if is_fp8 else UNSCALED)


def _request() -> Request:
    sampling = SamplingParams(max_tokens=1)
    return Request.make("r", [0], sampling, arrival=0.0, seed=0, namespace=Namespace("case"))
