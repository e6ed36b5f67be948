"""Rows over pages of which some begin with the same ones, as requests after a cached prefix do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from engine.attention.base import AttentionShape, AttentionStep
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import KVPages
from engine.attention.native import NativeAttention, NativeStep
from engine.attention.pinned import to_device
from tests.engine.support.paged_kv import CPU, Heads, chunk


class SharingRow(NamedTuple):
    """A row that begins with some pages of a prefix."""

    prefix: int
    pages: int
    """Pages of the prefix that it begins with; the others are its own."""
    before: int
    """Positions after these that were computed in steps before."""
    new: int = 1
    """Tokens of the step."""


class SharedPages:
    """Rows with random queries over pages in a random order. What no row sees is NaN."""

    def __init__(
        self,
        rows: Sequence[SharingRow],
        heads: Heads,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
        soft_cap: float | None = None,
        has_sinks: bool = False,
        seed: int = 0,
        device: torch.device = CPU,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.window = window
        self.shape = AttentionShape(
            heads.num, heads.num_kv_heads, heads.dim, page_size, frozenset({window}),
            soft_cap=soft_cap, has_sinks=has_sinks, latent=heads.latent,
        )  # fmt: skip
        parts = 2 if heads.latent is None else 1
        longest = {row.prefix: max(r.pages for r in rows if r.prefix == row.prefix) for row in rows}
        own = [-(-(row.before + row.new) // page_size) for row in rows]
        pages = iter(torch.randperm(sum(longest.values()) + sum(own), generator=generator).tolist())
        prefixes = {prefix: [next(pages) for _ in range(num)] for prefix, num in longest.items()}
        self.pages = KVPages(
            1, sum(longest.values()) + sum(own), page_size, heads.num_kv_heads, heads.dim, dtype, device, parts
        )
        self.pages.layer(0)[:, : self.pages.num_pages] = torch.nan
        slots = self.pages.layer(0).flatten(1, 2)
        chunks = []
        for row, num_own in zip(rows, own, strict=True):
            table = prefixes[row.prefix][: row.pages] + [next(pages) for _ in range(num_own)]
            start = row.pages * page_size + row.before
            for page, position in zip(table, range(0, start + row.new, page_size), strict=True):
                count = min(page_size, start + row.new - position)
                shape = parts, count, heads.num_kv_heads, heads.dim
                kv = torch.randn(shape, generator=generator, dtype=torch.float64)
                slots[:, page * page_size : page * page_size + count] = kv.to(device, dtype)
            chunks.append(chunk(start, row.new, table))
        self.batch = to_device(AttentionBatch.from_chunks(chunks, page_size, self.pages.null_page), device)
        num_tokens = sum(row.new for row in rows)
        query = torch.randn(num_tokens, heads.num, heads.dim, generator=generator, dtype=torch.float64)
        self.query = query.to(device, dtype)
        self.sinks = torch.randn(heads.num, generator=generator).to(device) if has_sinks else None

    def step(self, is_cascade: bool, isa: str | None = None) -> NativeStep:
        """Prepare the rows' step on CPUs."""
        shape = replace(self.shape, is_cascade=is_cascade)
        return NativeAttention(shape, isa).prepare(self.batch, self.pages.null_page)

    def attend(self, is_cascade: bool, isa: str | None = None) -> torch.Tensor:
        """Return the rows' attention on CPUs, [N, num_heads * value_dim]."""
        return self.attend_by(self.step(is_cascade, isa))

    def attend_by(self, step: AttentionStep) -> torch.Tensor:
        """Return the rows' attention by a step that was prepared, [N, num_heads * value_dim]."""
        return step.attend(self.pages.layer(0), self.query, self.window, sinks=self.sinks)
