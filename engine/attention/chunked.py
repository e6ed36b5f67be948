"""Attention within chunks (Llama 4): a query sees the positions from the last multiple of the chunk's size on.

    positions    0 1 2 3 4 5 6 7 8 9          chunks of 4, a row whose step computes 6 .. 9
    rows                 4 5 6 7 | 8 9        two rows of the cut batch: 2 tokens of 4 positions, 2 tokens of 2

A cut row has full attention, and its page table begins at its chunk, so every backend can compute it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.base import AttentionBackend, AttentionShape, AttentionStep
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales
from engine.attention.pinned import on_device


class ChunkedAttention:
    """A backend for models in which some layers attend within chunks."""

    captures_prompts = spreads_prompts = False

    def __init__(self, whole: AttentionBackend, chunk: int, page_size: int) -> None:
        """Attend with `whole`, to whole contexts or within chunks. Raises ValueError if a chunk would begin within
        a page.
        """
        if chunk % page_size:
            raise ValueError(
                f"page_size is {page_size}, and this model attends within chunks of {chunk} tokens: expected a "
                f"divisor of {chunk}, or max_model_len of at most {chunk}"
            )
        self._whole, self._chunk, self._page_size = whole, chunk, page_size
        self.name, self.is_capturable = whole.name, whole.is_capturable
        self.plans_by_bounds = whole.plans_by_bounds

    @staticmethod
    def unavailable(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Return that it cannot be chosen by itself; its backend reports whether it can run."""
        return "it consists of another backend"

    def prepare(self, batch: AttentionBatch, null_page: int) -> ChunkedStep:
        """Prepare the step for layers of both kinds."""
        whole = self._whole.prepare(batch, null_page)
        if max(batch.kv_lens_host) <= self._chunk:
            return ChunkedStep(whole, whole)
        cut = (cut_decodes if batch.is_bounded else cut_batch)(batch, self._chunk, self._page_size, null_page)
        return ChunkedStep(whole, self._whole.prepare(cut, null_page))


class ChunkedStep:
    """One step's batch. As an `AttentionStep`, it attends to whole contexts."""

    def __init__(self, whole: AttentionStep, cut: AttentionStep) -> None:
        self._whole = whole
        self.cut = cut
        """The same step for layers that attend within chunks."""

    @property
    def batch(self) -> AttentionBatch:
        """Implement `AttentionStep`."""
        return self._whole.batch

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `AttentionStep`."""
        return self._whole.attend(pages, query, window, scales, sinks)


def cut_of(step: AttentionStep) -> AttentionStep:
    """Return the part of a step for layers that attend within chunks."""
    assert isinstance(step, ChunkedStep)
    return step.cut


class _Piece(NamedTuple):
    """Tokens of one row in one chunk."""

    row: int
    base: int
    """The chunk's first position."""
    num_tokens: int
    kv_len: int
    """Number of the chunk's positions that have KV."""


def cut_batch(batch: AttentionBatch, chunk: int, page_size: int, null_page: int) -> AttentionBatch:
    """Return a batch of the same tokens, whose rows end with chunks. `page_size` divides `chunk`."""
    pieces, device = list(_pieces(batch, chunk)), batch.block_table.device
    counts = [piece.num_tokens for piece in pieces]
    lens = [piece.kv_len for piece in pieces]
    rows, firsts, used = (
        on_device(np.array(numbers, dtype=np.int64), device)[:, None]
        for numbers in (
            [piece.row for piece in pieces],
            [piece.base // page_size for piece in pieces],
            [-(-piece.kv_len // page_size) for piece in pieces],
        )
    )
    steps = torch.arange(-(-max(lens) // page_size), device=device)
    places = (firsts + steps).clamp(max=batch.block_table.shape[1] - 1)
    table = torch.where(steps < used, batch.block_table[rows, places], null_page)
    return replace(
        batch,
        query_lens=counts,
        kv_lens_host=lens,
        qo_indptr=on_device(np.cumsum([0, *counts], dtype=np.int32), device),
        kv_lens=on_device(np.array(lens, dtype=np.int32), device),
        block_table=table.to(torch.int32),
    )


def cut_decodes(batch: AttentionBatch, chunk: int, page_size: int, null_page: int) -> AttentionBatch:
    """Return what `cut_batch` does, for rows of one token whose lengths only the device knows."""
    assert batch.num_decodes == len(batch.kv_lens)
    before = (batch.kv_lens - 1).clamp(min=0) // chunk * chunk
    steps = torch.arange(chunk // page_size, device=before.device)
    places, most = before[:, None] // page_size + steps, batch.block_table.shape[1]
    table = batch.block_table.gather(1, places.clamp(max=most - 1))
    return replace(
        batch,
        kv_lens_host=[min(longest, chunk) for longest in batch.kv_lens_host],
        kv_lens=batch.kv_lens - before,
        block_table=torch.where(places < most, table, null_page),
    )


def _pieces(batch: AttentionBatch, chunk: int) -> Iterator[_Piece]:
    for row, (count, end) in enumerate(zip(batch.query_lens, batch.kv_lens_host, strict=True)):
        position = end - count
        while position < end:
            base = position // chunk * chunk
            stop = min(end, base + chunk)
            yield _Piece(row, base, stop - position, stop - base)
            position = stop
