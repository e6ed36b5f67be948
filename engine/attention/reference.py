"""Attention in plain torch, the oracle of tests: gather each row's KV, then scaled dot-product attention.

Query heads that share a KV head become extra query positions of it, so that grouped KV is never repeated:

    decode rows, together                          a prefill row, in blocks of queries
    query  [B, num_kv_heads, group, head_dim]      [num_kv_heads, group * block, head_dim]
    KV     [B, num_kv_heads, longest, head_dim]    [num_kv_heads, kv_len, head_dim]
    mask   [B, 1, 1, longest]                      [1, group * block, kv_len]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import AttentionShape
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales, gathered
from engine.attention.pinned import on_device

_MAX_SCORES = 1 << 22
"""Maximum number of scores of one head computed together: bounds the memory of a long prompt's mask."""
_MAX_GATHERED = 1 << 17
"""Maximum number of decode positions gathered together, unless a single row has more: also bounds memory."""
_FREE_PADDING = 512
"""Positions of padding that cost less than another call."""


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    """Some decode rows under one window: the slots to gather and the mask of visible positions."""

    first: int
    last: int
    """The rows are first .. last."""
    slots: torch.Tensor
    """int64 [rows * longest]: slots of each row's visible positions, padded with the null page's first slot."""
    mask: torch.Tensor | None
    """bool [rows, 1, 1, longest], True for visible positions; None without padding."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Some queries of one prefill row: tokens first .. last of the batch, seeing KV first_kv .. last_kv."""

    first: int
    last: int
    first_kv: int
    last_kv: int
    mask: torch.Tensor | None
    """bool [1, group * (last - first), last_kv - first_kv]; None: each query sees all of them."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One prefill row under one window."""

    slots: torch.Tensor
    """int64 [visible]: slots of the positions that any of the row's queries sees."""
    blocks: tuple[_Block, ...]
    """Blocks of queries; their first_kv and last_kv count from the first visible position."""


@dataclass(frozen=True, slots=True)
class _Windowed:
    """A batch under one window."""

    decodes: tuple[_DecodeRows, ...]
    prefills: tuple[_Prefill, ...]


class ReferenceAttention:
    """The backend that runs everywhere; tests compare the others with it."""

    name = "reference"
    is_capturable = captures_prompts = False
    plans_by_bounds = spreads_prompts = False

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    @staticmethod
    def unavailable(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Return None, because it runs wherever torch does."""
        return None

    def prepare(self, batch: AttentionBatch, null_page: int) -> ReferenceStep:
        """Compute slots and masks for each window that occurs in the model."""
        plans = {
            window: _Windowed(
                tuple(self._plan_decodes(batch, window, null_page)),
                tuple(self._plan_prefills(batch, window)),
            )
            for window in self._shape.windows
        }
        return ReferenceStep(self._shape, batch, plans)

    def _plan_decodes(self, batch: AttentionBatch, window: int | None, null_page: int) -> Iterator[_DecodeRows]:
        lens = batch.kv_lens_host[: batch.num_decodes]
        visible = [length if window is None else min(length, window) for length in lens]
        page_size, device = self._shape.page_size, batch.block_table.device
        for first, last in _similar_runs(visible):
            counts = on_device(np.array(visible[first:last]), device)[:, None]
            starts = on_device(np.array(lens[first:last]), device)[:, None] - counts
            longest = max(visible[first:last])
            steps = torch.arange(longest, device=device)
            mask = steps < counts
            padded = min(visible[first:last]) < longest
            positions = torch.where(mask, starts + steps, 0) if padded else starts + steps
            slots = _slots(batch.block_table[first:last], positions, page_size)
            if padded:
                slots = torch.where(mask, slots, null_page * page_size)
            yield _DecodeRows(first, last, slots.reshape(-1), mask[:, None, None] if padded else None)

    def _plan_prefills(self, batch: AttentionBatch, window: int | None) -> Iterator[_Prefill]:
        group = self._shape.num_heads // self._shape.num_kv_heads
        device = batch.block_table.device
        token = batch.num_decodes
        for row in range(batch.num_decodes, len(batch.query_lens)):
            num_queries, kv_len = batch.query_lens[row], batch.kv_lens_host[row]
            start = kv_len - num_queries
            base = 0 if window is None else max(0, start - window + 1)
            size = max(1, _MAX_SCORES // (group * max(1, kv_len - base)))
            blocks = []
            for first in range(0, num_queries, size):
                last = min(first + size, num_queries)
                if not batch.is_causal:
                    blocks.append(_Block(token + first, token + last, 0, kv_len, None))
                    continue
                seen = base if window is None else max(base, start + first - window + 1)
                mask = _causal(start + first, start + last, seen, window, device).repeat(group, 1)
                blocks.append(_Block(token + first, token + last, seen - base, start + last - base, mask[None]))
            positions = torch.arange(base, kv_len, device=device)
            slots = _slots(batch.block_table[row : row + 1], positions[None], self._shape.page_size)
            yield _Prefill(slots[0], tuple(blocks))
            token += num_queries


class ReferenceStep:
    """One step's batch for the reference backend."""

    def __init__(self, shape: AttentionShape, batch: AttentionBatch, plans: dict[int | None, _Windowed]) -> None:
        self._shape = shape
        self.batch = batch
        self._plans = plans

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `AttentionStep.attend`."""
        return self._attend(pages, query, window, scales, sinks)[0]

    def attend_with_sums(
        self, pages: torch.Tensor, query: torch.Tensor, scales: KVScales = UNSCALED
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `StepWithSums`."""
        out, sums = self._attend(pages, query, None, scales, None)
        return out.unflatten(1, (query.shape[1], -1)), sums

    def _attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results, and the logarithms of the sums of the weights if `AttentionShape.needs_sums`."""
        plan = self._plans[window]
        out = query.new_empty(query.shape[0], query.shape[1] * self._shape.value_dim)
        sums = query.new_empty(query.shape[:2], dtype=torch.float32)
        for decodes in plan.decodes:
            rows = slice(decodes.first, decodes.last)
            self._decode(decodes, pages, scales, query[rows], sinks, out[rows], sums[rows])
        for prefill in plan.prefills:
            self._prefill(prefill, pages, scales, query, sinks, out, sums)
        return out, sums

    def _decode(
        self,
        plan: _DecodeRows,
        pages: torch.Tensor,
        scales: KVScales,
        query: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        sums: torch.Tensor,
    ) -> None:
        rows, heads, dim = query.shape
        num_kv_heads = self._shape.num_kv_heads
        grouped = query.reshape(rows, num_kv_heads, heads // num_kv_heads, dim)
        keys, values = gathered(pages, plan.slots, query.dtype, scales, self._shape.latent)
        keys, values = (part.unflatten(0, (rows, -1)).transpose(1, 2) for part in (keys, values))
        per_query = None if sinks is None else sinks.view(num_kv_heads, -1)
        attended, weights = self._attended(grouped, keys, values, plan.mask, per_query)
        out[:] = attended.reshape(rows, heads * self._shape.value_dim)
        if weights is not None:
            sums[:] = weights.reshape(rows, heads)

    def _prefill(
        self,
        plan: _Prefill,
        pages: torch.Tensor,
        scales: KVScales,
        query: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        sums: torch.Tensor,
    ) -> None:
        num_kv_heads, dim = self._shape.num_kv_heads, query.shape[2]
        kv = gathered(pages, plan.slots, query.dtype, scales, self._shape.latent)
        row_keys, row_values = (part.transpose(0, 1) for part in kv)
        for block in plan.blocks:
            size, tokens = block.last - block.first, slice(block.first, block.last)
            grouped = query[tokens].view(size, num_kv_heads, -1, dim).permute(1, 2, 0, 3)
            seen = slice(block.first_kv, block.last_kv)
            attended, weights = self._attended(
                grouped.reshape(1, num_kv_heads, -1, dim),
                row_keys[None, :, seen],
                row_values[None, :, seen],
                None if block.mask is None else block.mask[None],
                None if sinks is None else sinks.view(num_kv_heads, -1).repeat_interleave(size, 1),
            )
            ungrouped = attended.view(num_kv_heads, -1, size, self._shape.value_dim).permute(2, 0, 1, 3)
            out[tokens] = ungrouped.reshape(size, -1)
            if weights is not None:
                sums[tokens] = weights.view(num_kv_heads, -1, size).permute(2, 0, 1).reshape(size, -1)

    def _attended(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return softmax(scores) @ values for query [B, H, Q, D], keys and values [B, H, K, D], sinks [H, Q]; and
        the logarithms of the sums of weights, [B, H, Q], if they are needed.
        """
        scale, cap = self._shape.scale, self._shape.soft_cap
        if cap is None and sinks is None and not self._shape.needs_sums:
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale), None
        scores = (query @ keys.transpose(-1, -2)).float() * scale
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            sink = sinks.float()[None, :, :, None].expand(len(scores), -1, -1, -1)
            scores = torch.cat((scores, sink), -1)
        if not self._shape.needs_sums:
            return scores.softmax(-1)[..., : keys.shape[2]].to(values.dtype) @ values, None
        sums = scores.logsumexp(-1)
        shares = torch.exp(scores - sums.clamp(min=torch.finfo(torch.float32).min)[..., None])
        return shares.to(values.dtype) @ values, sums


def _slots(block_table: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """int64 [R, T]: the slots of `positions` (int64 [R, T]) of the rows of a block table [R, P]."""
    pages = block_table.gather(1, positions // page_size).long()
    return pages * page_size + positions % page_size


def _similar_runs(lens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of rows to gather together: padded to its longest row, a run at most about doubles in size."""
    first, longest, total = 0, 0, 0
    for row, length in enumerate(lens):
        padded = max(longest, length) * (row + 1 - first)
        if row > first and padded > min(2 * (total + length) + _FREE_PADDING, _MAX_GATHERED):
            yield first, row
            first, longest, total = row, 0, 0
        longest, total = max(longest, length), total + length
    if lens:
        yield first, len(lens)


def _causal(first: int, last: int, seen: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [last - first, last - seen]: whether the query at position first + i sees position seen + j."""
    queries = torch.arange(first, last, device=device)[:, None]
    positions = torch.arange(seen, last, device=device)
    mask = positions <= queries
    return mask if window is None else mask & (positions > queries - window)
