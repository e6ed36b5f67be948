"""Attention to KV that the ranks with the same key-value heads have divided among them (context parallelism).

A page of L positions is on each of c ranks, which has its own L / c of them: of a row with n positions so far,

    rank 0   | 0 1 2 3 | 12 13 14 15 |          c = 3, L = 12, n = 18:
    rank 1   | 4 5 6 7 | 16 17       |          each rank's positions are in order in its pages, so that
    rank 2   | 8 9 ..  |             |          a backend sees a shorter row with the same page table

Attention to a part of the positions is a softmax whose sum of weights is known, so parts can be merged (Milakov et
al. 2018, arXiv:1805.02867). They are computed in three ways:

    decodes, and few tokens of a prompt      queries of all ranks' heads ─▶ each rank: its part ─▶ back, merged
    a prompt's new tokens                    each rank: its heads, before it stores its part
    many tokens after earlier KV             parts of the KV go round the ranks, each rank: its heads
                                             (ring attention, Liu et al. 2023, arXiv:2310.01889)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import AttentionBackend, AttentionShape, AttentionStep, StepWithSums
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales, copy_slots
from engine.attention.pinned import on_device
from engine.parallel.context_group import ContextGroup

Part = tuple[torch.Tensor, torch.Tensor]
"""Results [N, heads, value_dim] and the logarithms of their sums of weights [N, heads]."""


class ContextParallelAttention:
    """A backend whose pages have this rank's part of the positions. It consists of two others."""

    captures_prompts = spreads_prompts = False

    def __init__(
        self,
        choose: Callable[[AttentionShape], AttentionBackend],
        shape: AttentionShape,
        group: ContextGroup,
        ring_tokens: int,
    ) -> None:
        """`choose` returns a backend for a shape; `shape` is this rank's, with the page size of the whole group.
        `ring_tokens`: the tokens of a row from which on KV goes round.
        """
        self._group, self._ring_tokens = group, ring_tokens
        self._divided = _Divided(shape.page_size, group.size, group.rank)
        part = replace(shape, page_size=shape.page_size // group.size, needs_sums=True)
        self._own = choose(part)
        self._all_heads = choose(replace(part, num_heads=shape.num_heads * group.size))
        self.name = self._own.name
        self.is_capturable, self.plans_by_bounds = self._all_heads.is_capturable, self._all_heads.plans_by_bounds

    @staticmethod
    def unavailable(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Return that it cannot be chosen by itself; its parts report whether they can run."""
        return "it consists of two other backends"

    def prepare(self, batch: AttentionBatch, null_page: int) -> AttentionStep:
        """Prepare the parts. Positions of other ranks are stored in the page after the null page, never read."""
        return ContextParallelStep(
            self._own, self._all_heads, self._group, self._divided, batch, null_page, self._ring_tokens
        )


@dataclass(frozen=True, slots=True)
class _Divided:
    """How positions are divided."""

    page_size: int
    """Positions of a page on all ranks."""
    size: int
    rank: int

    @property
    def own_size(self) -> int:
        """Positions of a page on one rank."""
        return self.page_size // self.size

    def count(self, length: int, rank: int) -> int:
        """Return how many of a row's first `length` positions a rank has."""
        whole, rest = divmod(length, self.page_size)
        return whole * self.own_size + min(max(rest - rank * self.own_size, 0), self.own_size)

    def counts(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return `count` of each length, int32, for this rank."""
        whole, rest = lengths // self.page_size, lengths % self.page_size
        return whole * self.own_size + (rest - self.rank * self.own_size).clamp(0, self.own_size)

    def slots(self, slots: torch.Tensor, elsewhere: int) -> torch.Tensor:
        """Map slots in whole pages to those on this rank, or to `elsewhere` if another rank has the position."""
        page, offset = slots // self.page_size, slots % self.page_size
        own = page * self.own_size + offset % self.own_size
        return torch.where(offset // self.own_size == self.rank, own, elsewhere)


@dataclass(frozen=True, slots=True)
class _Row:
    """The tokens of one request in a step."""

    first: int
    """Index of its first token in the step."""
    num_tokens: int
    end: int
    """Positions that it has with this step's."""

    @property
    def earlier(self) -> int:
        """Positions to read from pages: with a single token's own, otherwise those before the step."""
        return self.end if self.num_tokens == 1 else self.end - self.num_tokens


class _Rows:
    """Some of a batch's rows."""

    def __init__(self, batch: AttentionBatch, all_rows: Sequence[_Row], numbers: Sequence[int]) -> None:
        self.rows, self._device = [all_rows[number] for number in numbers], batch.kv_lens.device
        self.tokens: torch.Tensor | None = None
        """Indices of their tokens in the step; None: all of them."""
        self.table, self.whole = batch.block_table, batch
        self.are_decodes = len(self.rows) == batch.num_decodes == len(all_rows)
        """Whether they are all rows of a step of decodes."""
        if len(numbers) < len(all_rows):
            tokens = np.concatenate([np.arange(row.first, row.first + row.num_tokens) for row in self.rows])
            self.tokens = on_device(tokens, self._device)
            self.table = self.table.index_select(0, on_device(np.array(numbers), self._device))

    def of_tokens(self, part: torch.Tensor) -> torch.Tensor:
        """Return those of [N, ...] that belong to these rows."""
        return part if self.tokens is None else part.index_select(0, self.tokens)

    def batch(
        self,
        table: torch.Tensor,
        lens: Sequence[int],
        lens_on_device: torch.Tensor | None = None,
        *,
        is_causal: bool,
    ) -> AttentionBatch:
        """Return the rows as a batch of their own, with this page table and so many positions in it."""
        counts, indptr = [row.num_tokens for row in self.rows], self.whole.qo_indptr
        if self.tokens is not None:
            indptr = on_device(np.cumsum([0, *counts], dtype=np.int32), self._device)
        if lens_on_device is None:
            lens_on_device = on_device(np.array(lens, dtype=np.int32), self._device)
        return AttentionBatch(
            num_decodes=next((number for number, count in enumerate(counts) if count > 1), len(counts)),
            query_lens=counts,
            kv_lens_host=lens,
            qo_indptr=indptr,
            kv_lens=lens_on_device,
            block_table=table,
            slot_mapping=self.of_tokens(self.whole.slot_mapping),
            positions=self.of_tokens(self.whole.positions),
            is_causal=is_causal,
            is_bounded=self.whole.is_bounded,
        )


class _Asked:
    """Rows whose queries go to all ranks, each of which has a part of their positions in its pages."""

    def __init__(
        self, all_heads: AttentionBackend, group: ContextGroup, divided: _Divided, rows: _Rows, null_page: int
    ) -> None:
        self.rows, self._group = rows, group
        lens = [divided.count(row.earlier, group.rank) for row in rows.rows]
        # Those of a recorded step are exact only on the device.
        exact = divided.counts(rows.whole.kv_lens) if rows.are_decodes else None
        batch = rows.batch(rows.table, lens, exact, is_causal=False)
        self._step = _with_sums(all_heads.prepare(batch, null_page))

    def attend(self, pages: torch.Tensor, query: torch.Tensor, scales: KVScales) -> Part:
        """Return the results of these rows' tokens for this rank's heads. `query` has all tokens of the step."""
        query, size = self.rows.of_tokens(query), self._group.size
        asked = self._group.gathered(query).transpose(0, 1).flatten(1, 2)
        results, sums = self._step.attend_with_sums(pages, asked, scales)
        parts = (part.unflatten(1, (size, -1)).transpose(0, 1) for part in (results, sums))
        return merged(*map(self._group.exchanged, parts))


class _New:
    """Rows of several tokens, which attend to each other's KV in pages for this step only."""

    def __init__(
        self,
        own: AttentionBackend,
        page_size: int,
        stored: torch.Tensor,
        batch: AttentionBatch,
        all_rows: Sequence[_Row],
        numbers: Sequence[int],
    ) -> None:
        """`stored`: the slot of each of the step's tokens in the layer's pages."""
        self.rows, self._stored = _Rows(batch, all_rows, numbers), stored
        # The pages of a row hold only its tokens. Single tokens, which are not read here, are packed.
        counts = [row.num_tokens for row in self.rows.rows]
        sizes = [-(-count // page_size) for count in counts]
        singles = sum(row.num_tokens == 1 for row in all_rows)
        ends = [*accumulate(sizes, initial=-(-singles // page_size))]
        self._num_pages = ends[-1]
        slots, first_pages, single = [], iter(ends), iter(range(singles))
        for row in all_rows:
            start = next(single) if row.num_tokens == 1 else next(first_pages) * page_size
            slots.append(np.arange(start, start + row.num_tokens))
        self.slots = on_device(np.concatenate(slots), stored.device)
        """The slot of each of the step's tokens in these pages."""
        table = np.full((len(counts), max(sizes)), self._num_pages, dtype=np.int32)
        for line, first, size in zip(table, ends, sizes, strict=False):
            line[:size] = np.arange(first, first + size)
        own_batch = self.rows.batch(on_device(table, stored.device), counts, is_causal=True)
        self._step = _with_sums(own.prepare(own_batch, self._num_pages))
        self._pages: torch.Tensor | None = None

    def pages_like(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the pages, of which the last is the null page, for a layer with such pages."""
        if self._pages is None or self._pages.shape[2:] != pages.shape[2:]:
            self._pages = pages.new_zeros(len(pages), self._num_pages + 1, *pages.shape[2:])
        return self._pages

    def store(self, pages: torch.Tensor) -> None:
        """Copy the step's KV into a layer's pages."""
        copy_slots(self.pages_like(pages), self.slots, pages, self._stored)

    def attend(self, pages: torch.Tensor, query: torch.Tensor, scales: KVScales) -> Part:
        """Return the results of these rows' tokens for their own positions."""
        return self._step.attend_with_sums(self.pages_like(pages), self.rows.of_tokens(query), scales)


class _Ring:
    """Rows with many tokens after earlier positions, whose KV passes from rank to rank."""

    def __init__(
        self, own: AttentionBackend, group: ContextGroup, divided: _Divided, rows: _Rows, null_page: int
    ) -> None:
        self.rows, self._group, self._steps = rows, group, list[StepWithSums]()
        sizes = [-(-row.earlier // divided.page_size) for row in rows.rows]
        at = np.concatenate([number * rows.table.shape[1] + np.arange(size) for number, size in enumerate(sizes)])
        own_pages = rows.table.flatten().index_select(0, on_device(at, rows.table.device)).long()
        self._sent = F.pad(own_pages, (0, 1), value=null_page)
        """Pages of this rank that go round, with the null page last."""
        table = np.full((len(sizes), max(sizes)), len(at), dtype=np.int32)
        for line, first, size in zip(table, accumulate(sizes, initial=0), sizes, strict=False):
            line[:size] = np.arange(first, first + size)
        on_all = on_device(table, rows.table.device)
        for hop in range(group.size):
            owner = (group.rank - hop) % group.size
            lens = [divided.count(row.earlier, owner) for row in rows.rows]
            self._steps.append(_with_sums(own.prepare(rows.batch(on_all, lens, is_causal=False), len(at))))

    def attend(self, pages: torch.Tensor, query: torch.Tensor, scales: KVScales) -> Part:
        """Return the results of these rows' tokens for their earlier positions. While a rank computes with a part
        of the KV, it sends it to the next rank.
        """
        query, block, parts = self.rows.of_tokens(query), pages.index_select(1, self._sent), list[Part]()
        for number, step in enumerate(self._steps):
            is_last = number == len(self._steps) - 1
            passed = None if is_last else self._group.passed_on(block)
            parts.append(step.attend_with_sums(block, query, scales))
            if len(parts) == 2:
                parts = [merged(*map(torch.stack, zip(*parts, strict=True)))]
            if passed is not None:
                block = passed()
        return parts[0]


class ContextParallelStep:
    """One step's batch. The decoder writes KV where `written` says, at the slots of `batch`."""

    def __init__(
        self,
        own: AttentionBackend,
        all_heads: AttentionBackend,
        group: ContextGroup,
        divided: _Divided,
        batch: AttentionBatch,
        null_page: int,
        ring_tokens: int,
    ) -> None:
        slots = divided.slots(batch.slot_mapping, (null_page + 1) * divided.own_size)
        firsts = accumulate(batch.query_lens, initial=0)
        rows = list(map(_Row, firsts, batch.query_lens, batch.kv_lens_host))
        new = [number for number, row in enumerate(rows) if row.num_tokens > 1]
        ring = [number for number in new if rows[number].num_tokens >= ring_tokens and rows[number].earlier]
        asked = [number for number, row in enumerate(rows) if number not in ring and row.earlier]
        self._new = _New(own, divided.own_size, slots, batch, rows, new) if new else None
        self._parts: list[_Asked | _New | _Ring] = [] if self._new is None else [self._new]
        if asked:
            self._parts.append(_Asked(all_heads, group, divided, _Rows(batch, rows, asked), null_page))
        if ring:
            self._parts.append(_Ring(own, group, divided, _Rows(batch, rows, ring), null_page))
        self.whole_slots = batch.slot_mapping
        self.batch = replace(batch, slot_mapping=slots if self._new is None else self._new.slots)

    def written(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the memory for this step's KV, given a layer's pages: these; or other pages until `attend`, if
        tokens of the step attend to each other's KV, of which the layer's pages get only a part.
        """
        return pages if self._new is None else self._new.pages_like(pages)

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `AttentionStep.attend`."""
        assert window is None and sinks is None, "such models are refused at the start"
        if self._new is not None:
            self._new.store(pages)
        out = sums = None
        for part in self._parts:
            found, tokens = part.attend(pages, query, scales), part.rows.tokens
            if out is None or sums is None:
                if tokens is None and len(self._parts) == 1:
                    out, sums = found
                    break
                out = query.new_zeros(*query.shape[:2], found[0].shape[2], dtype=torch.float32)
                sums = torch.full(query.shape[:2], -torch.inf, device=query.device)
            at = slice(None) if tokens is None else tokens
            both = zip((out[at], sums[at]), found, strict=True)
            out[at], sums[at] = merged(*map(torch.stack, both))
        assert out is not None and sums is not None, "a step has tokens"
        return out.to(query.dtype).flatten(1)


def whole_slots(step: AttentionStep) -> torch.Tensor:
    """Return int64 [N]: the slot of each token, in pages that no ranks divide."""
    return step.whole_slots if isinstance(step, ContextParallelStep) else step.batch.slot_mapping


def step_written(step: AttentionStep, pages: torch.Tensor) -> torch.Tensor:
    """Return where a layer's new KV is written, at the slots of the step's batch."""
    return step.written(pages) if isinstance(step, ContextParallelStep) else pages


def merged(results: torch.Tensor, sums: torch.Tensor) -> Part:
    """Merge attention to P parts of the positions: [P, N, heads, value_dim] and [P, N, heads]. In float32."""
    highest = sums.amax(0).clamp(min=torch.finfo(torch.float32).min)
    weights = torch.exp(sums - highest)
    total = weights.sum(0)
    weighted = (results.float() * weights[..., None]).sum(0)
    return weighted / total.clamp(min=torch.finfo(torch.float32).tiny)[..., None], highest + total.log()


def _with_sums(step: AttentionStep) -> StepWithSums:
    return cast("StepWithSums", step)  # `AttentionShape.needs_sums` has refused other backends.
