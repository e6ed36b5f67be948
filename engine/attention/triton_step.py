"""A step's attention by Triton kernels: decode rows, split over their KV, and extend rows with several queries.

    tokens    a | b | c c c c c | d d d d d d d d d d d ...
    by        [   decode        | extend                   ]     c: a few tokens after a long cached prefix

Each program of an extend has a tile of queries and reads all KV before them, so a few queries make too few
programs for a GPU. So a few tokens after many positions become decode rows that share these positions (`cascade`),
and programs have pieces of the shared KV.

Pages of any size and strides are read in place. The first layer lays out the work for all layers.
"""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import torch

from engine.attention.base import AttentionShape
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales
from engine.attention.pinned import on_device
from engine.kernels.triton.cascade import attend_shared, cascade_config
from engine.kernels.triton.decode import Parts, decode, decode_config
from engine.kernels.triton.extend import extend, extend_config, query_tiles
from engine.kernels.triton.extend_tma import TMA_ROWS, extend_tma, tma_tile
from engine.kernels.triton.kv_heads import KVHeads
from engine.kernels.triton.launch_config import decode_threads, num_programs
from engine.kernels.triton.shared_prefixes import RowGroups
from engine.kernels.triton.work_list import WorkList

_FEW_TOKENS, _MANY_POSITIONS = 128, 1024
"""A row with so few tokens after so many positions is spread over decode rows ..."""
_MOST_ROWS = 256
"""... unless there are more such rows than are examined for shared prefixes."""


class TritonStep:
    """One step's batch for the Triton kernels."""

    def __init__(self, shape: AttentionShape, batch: AttentionBatch) -> None:
        self._shape, self.batch = shape, batch
        self._decodes: _DecodeLaunch | None = None
        self._extends: _ExtendLaunch | None = None

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `AttentionStep.attend`."""
        return self._attend(pages, query, window, scales, sinks, None)

    def attend_with_sums(
        self, pages: torch.Tensor, query: torch.Tensor, scales: KVScales = UNSCALED
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `StepWithSums`."""
        sums = query.new_empty(query.shape[:2], dtype=torch.float32)
        out = self._attend(pages, query, None, scales, None, sums)
        return out.unflatten(1, (query.shape[1], -1)), sums

    def _attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales,
        sinks: torch.Tensor | None,
        sums: torch.Tensor | None,
    ) -> torch.Tensor:
        query = query if query.stride(2) == 1 else query.contiguous()
        out = query.new_empty(query.shape[0], query.shape[1] * self._shape.value_dim)
        if self._decodes is None and self._extends is None:
            self._lay_out(query.element_size())
        for part in (self._decodes, self._extends):
            if part is not None:
                part.attend(query, pages, out, window, scales, sinks, sums)
        return out

    def _lay_out(self, element_size: int) -> None:
        batch, shape = self.batch, self._shape
        num_rows = batch.num_decodes
        table, kv_lens = batch.block_table[:num_rows], batch.kv_lens[:num_rows]
        if _is_spreadable(shape, batch, element_size) and (num_spread := _num_spread(batch)):
            num_rows += num_spread
            rows = batch.rows_of_tokens(num_rows)
            table = batch.block_table.index_select(0, rows)
            kv_lens = batch.kv_lens.index_select(0, rows)
            if batch.is_causal:
                kv_lens = (batch.positions[: len(rows)] + 1).int()
        if len(kv_lens):
            self._decodes = _DecodeLaunch(shape, table, kv_lens, element_size)
        if num_rows < len(batch.query_lens):
            self._extends = _ExtendLaunch(shape, batch, num_rows, element_size)


def _is_spreadable(shape: AttentionShape, batch: AttentionBatch, element_size: int) -> bool:
    """Whether tokens of a row could attend as separate rows that share the positions before them."""
    if not shape.is_cascade or batch.is_bounded or shape.windows != frozenset({None}):
        return False
    return cascade_config(KVHeads.of(*shape.heads), element_size, batch.kv_lens.device) is not None


def _num_spread(batch: AttentionBatch) -> int:
    """Return how many leading rows after the decodes have few tokens after many positions."""
    room, first = _MOST_ROWS - batch.num_decodes, batch.num_decodes
    lens = zip(batch.query_lens[first:], batch.kv_lens_host[first:], strict=True)
    own = 1 if batch.is_causal else 0
    found = takewhile(lambda row: row[0] <= _FEW_TOKENS and row[1] - own * row[0] >= _MANY_POSITIONS, lens)
    totals = np.cumsum([count for count, _ in found])
    return int((totals <= room).sum())


class _DecodeLaunch:
    """The launch for rows with one token: a work list per window of the model, and room for partial results.

    In layers without a window, rows that begin alike attend to their shared prefix together.
    """

    def __init__(
        self, shape: AttentionShape, block_table: torch.Tensor, kv_lens: torch.Tensor, element_size: int
    ) -> None:
        """block_table: int32 [R, P]; kv_lens: int32 [R], with one query at the last position."""
        rows, device = len(kv_lens), kv_lens.device
        self._heads = heads = KVHeads.of(*shape.heads)
        program = decode_config(heads, element_size, device)
        assert program is not None, "TritonAttention.unavailable has refused such devices"
        self._scale, self._soft_cap, self._program = shape.scale, shape.soft_cap, program
        self._block_table, self._kv_lens = block_table, kv_lens
        self._work: dict[int | None, WorkList] = {}
        widens = shape.kv_dtype is not None and shape.kv_dtype.itemsize < element_size
        threads = decode_threads(heads)
        programs = num_programs(program.shared_bytes, device, widens=widens, threads=threads)
        groups, shared_programs, self._shared_program = None, 1, None
        is_cascade = shape.is_cascade and rows > 1 and None in shape.windows
        if is_cascade and (config := cascade_config(heads, element_size, device)) is not None:
            self._shared_program, most_members = config
            groups = RowGroups(rows, shape.page_size, most_members, device)
            groups.find(self._block_table, self._kv_lens)
            # More queries need as many registers as widening does.
            shared_bytes = self._shared_program.shared_bytes
            shared_programs = num_programs(shared_bytes, device, widens=True, threads=threads)
        for window in shape.windows:
            own = groups if window is None else None
            work = WorkList(rows, heads.count, programs, device, own, shared_programs)
            work.build(self._kv_lens, window)
            self._work[window] = work
        capacity = max(work.capacity for work in self._work.values())
        self._parts = Parts(capacity, heads, device)

    def attend(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        out: torch.Tensor,
        window: int | None,
        scales: KVScales,
        sinks: torch.Tensor | None,
        sums: torch.Tensor | None,
    ) -> None:
        query, work = query[: len(self._kv_lens)], self._work[window]
        if work.groups is not None and self._shared_program is not None:
            attend_shared(
                query,
                pages,
                self._block_table,
                work,
                self._parts,
                self._heads,
                program=self._shared_program,
                scale=self._scale,
                kv_scales=scales,
                soft_cap=self._soft_cap,
            )
        decode(
            query,
            pages,
            self._block_table,
            self._kv_lens,
            work,
            self._parts,
            out,
            self._heads,
            program=self._program,
            scale=self._scale,
            window=window,
            kv_scales=scales,
            soft_cap=self._soft_cap,
            sinks=sinks,
            sums=sums,
        )


class _ExtendLaunch:
    """The launch for the other rows, whose queries are cut into tiles."""

    def __init__(self, shape: AttentionShape, batch: AttentionBatch, first: int, element_size: int) -> None:
        """`first`: the first of these rows."""
        device = batch.kv_lens.device
        self._heads, longest = KVHeads.of(*shape.heads), max(batch.query_lens[first:])
        program = extend_config(self._heads, element_size, longest, device)
        assert program is not None, "TritonAttention.unavailable has refused such devices"
        self._scale, self._soft_cap = shape.scale, shape.soft_cap
        self._program, self._batch = program, batch
        block = program.rows // self._heads.group
        self._tma = None
        if program.rows == TMA_ROWS:
            unusual = shape.unusual is not None or shape.needs_sums
            self._tma = tma_tile(shape.page_size, shape.head_dim, element_size, device, is_unusual=unusual)
        self._tiles = (
            _bounded_tiles(len(batch.query_lens) - first, first, longest, block, device)
            if batch.is_bounded
            else on_device(query_tiles(batch.query_lens, batch.kv_lens_host, first, block), device)
        )

    def attend(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        out: torch.Tensor,
        window: int | None,
        scales: KVScales,
        sinks: torch.Tensor | None,
        sums: torch.Tensor | None,
    ) -> None:
        batch = self._batch
        rows = batch.block_table, batch.qo_indptr, batch.kv_lens, self._tiles, out
        if self._tma is not None:
            tile, scale = self._tma, self._scale
            extend_tma(query, pages, *rows, tile=tile, scale=scale, window=window, kv_scales=scales)
            return
        extend(
            query,
            pages,
            *rows,
            self._heads,
            program=self._program,
            scale=self._scale,
            window=window,
            kv_scales=scales,
            soft_cap=self._soft_cap,
            sinks=sinks,
            sums=sums,
            is_causal=batch.is_causal,
        )


def _bounded_tiles(num_rows: int, first_row: int, longest: int, block: int, device: torch.device) -> torch.Tensor:
    """Return tiles of `block` queries, as `query_tiles` does, for rows of up to `longest` queries: made on the
    device, so that a graph needs no data from the host. Tiles past a row's queries compute nothing.
    """
    each = -(-longest // block)
    tile = torch.arange(num_rows * each, dtype=torch.int32, device=device)
    return torch.stack((tile // each + first_row, tile % each * block), dim=1)
