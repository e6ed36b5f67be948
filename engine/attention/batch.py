"""The metadata of a step's ragged batch: built once per step, shared by all layers and backends.

rows:        decode rows first           then prefill rows
tokens:      [ a | b | c |               d d d d d | e e e ]          "ragged": no padding
qo_indptr:     0   1   2   3                         8       11

token t of a row at position p:  slot = page_table[p // page_size] * page_size + p % page_size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.pinned import on_device
from engine.attention.state_batch import StateBatch
from engine.values.plan import Chunk

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The ragged batch of one step. R rows, N tokens, P pages in the longest page table.

    A row attends from its chunk's positions to all of its positions so far: causal, including the chunk (unless
    `is_causal` says otherwise).
    """

    num_decodes: int
    """Number of leading rows with exactly one token. Rows after them may have any number."""
    query_lens: Sequence[int]
    """[R] number of tokens of each row in this step, on the host."""
    kv_lens_host: Sequence[int]
    """[R] number of positions of each row that have KV once this step's KV is written, on the host."""
    qo_indptr: torch.Tensor
    """int32 [R + 1]: row r's tokens are qo_indptr[r] .. qo_indptr[r + 1]."""
    kv_lens: torch.Tensor
    """int32 [R]: `kv_lens_host` on the device."""
    block_table: torch.Tensor
    """int32 [R, P]: page ids; entries past a row's own pages hold the null page."""
    slot_mapping: torch.Tensor
    """int64 [N]: the slot to which each token's KV is written; slot = page * page_size + offset."""
    positions: torch.Tensor
    """int64 [N]: each token's position in its request."""
    states: StateBatch | None = None
    """The use of recurrent states; None in a model without any."""
    is_causal: bool = True
    """Whether the tokens of a row are the last of its positions, and see only those up to their own; otherwise
    they see all positions."""
    is_bounded: bool = False
    """Whether lengths on the host are only upper bounds, as in graphs; those on the device are exact."""
    more_tables: torch.Tensor | None = None
    """int32 [G, R, P]: the block tables of the other groups of layers (`LayerGroups`), if there are any. Entries
    that the window has passed hold the null page."""
    more_slots: torch.Tensor | None = None
    """int64 [G, N]: the slots in the pages of these groups."""

    def of_group(self, group: int) -> AttentionBatch:
        """Return the batch for one group of layers, counted from 0."""
        if not group:
            return self
        assert self.more_tables is not None and self.more_slots is not None
        table, slots = self.more_tables[group - 1], self.more_slots[group - 1]
        return replace(self, block_table=table, slot_mapping=slots, more_tables=None, more_slots=None)

    def rows_of_tokens(self, num_rows: int) -> torch.Tensor:
        """Return int64 [tokens of the first `num_rows` rows]: the row of each."""
        rows = np.repeat(np.arange(num_rows), self.query_lens[:num_rows])
        return on_device(rows, self.block_table.device)

    def spread(self) -> AttentionBatch:
        """Return the batch with a row for each token, which attends to its own position and all before it. Not for
        models with states, or with other groups of layers.
        """
        lens = zip(self.query_lens, self.kv_lens_host, strict=True)
        kv_lens = [length for count, end in lens for length in range(end - count + 1, end + 1)]
        count, rows = len(kv_lens), self.rows_of_tokens(len(self.query_lens))
        return replace(
            self,
            num_decodes=count,
            query_lens=[1] * count,
            kv_lens_host=kv_lens,
            qo_indptr=torch.arange(count + 1, dtype=torch.int32, device=rows.device),
            kv_lens=(self.positions + 1).int(),
            block_table=self.block_table.index_select(0, rows),
        )

    @classmethod
    def from_chunks(
        cls,
        chunks: Sequence[Chunk],
        page_size: int,
        null_page: int,
        null_slot: int | None = None,
        num_groups: int = 1,
    ) -> AttentionBatch:
        """Build the batch of a plan's chunks (at least one), in their order, on the host. `null_slot` is that of
        the model's states; None if it has none. `num_groups`: groups of layers with page tables of their own.
        """
        query_lens = [chunk.num_tokens for chunk in chunks]
        num_decodes = next((row for row, n in enumerate(query_lens) if n != 1), len(chunks))
        ends = [chunk.start + chunk.num_tokens for chunk in chunks]
        pages = [pages_of(chunk, num_groups) for chunk in chunks]
        table = block_table(pages, [(end - 1) // page_size + 1 for end in ends], null_page)
        if num_decodes == len(chunks):  # Most steps: lists are faster here than a dozen numpy calls.
            indptr, positions = np.arange(len(chunks) + 1, dtype=np.int32), np.array(ends, dtype=np.int64) - 1
            slots = np.array([_last_slot(own, end - 1, page_size) for own, end in zip(pages, ends, strict=True)])
        else:
            firsts = [*accumulate(query_lens, initial=0)]
            indptr = np.array(firsts, dtype=np.int32)
            # Difference of a token's position in its row, and in all rows of the table, and its index in the step.
            lacking = [chunk.start - first for chunk, first in zip(chunks, firsts, strict=False)]
            row_size = table.shape[1] * page_size
            in_table = [less + row * row_size for row, less in enumerate(lacking)]
            positions, places = np.array([lacking, in_table]).repeat(query_lens, 1) + np.arange(firsts[-1])
            slots_of_table, inside = np.divmod(places, page_size)
            slots = np.multiply(table.ravel()[slots_of_table], page_size, dtype=np.int64) + inside

        tables = more_slots = None
        if num_groups > 1:
            of_tokens = np.repeat(np.arange(len(chunks)), query_lens), positions // page_size
            tables = _more_tables(chunks, ends, page_size, null_page, table.shape[1], num_groups - 1)
            more_slots = tables[:, *of_tokens].astype(np.int64, order="C") * page_size + positions % page_size
        return cls(
            num_decodes=num_decodes,
            query_lens=query_lens,
            kv_lens_host=ends,
            qo_indptr=torch.from_numpy(indptr),
            kv_lens=torch.from_numpy(np.array(ends, dtype=np.int32)),
            block_table=torch.from_numpy(table),
            slot_mapping=torch.from_numpy(slots),
            positions=torch.from_numpy(positions),
            states=None if null_slot is None else StateBatch.from_chunks(chunks, null_slot),
            more_tables=None if tables is None else torch.from_numpy(tables),
            more_slots=None if more_slots is None else torch.from_numpy(more_slots),
        )


def _last_slot(pages: Sequence[int], position: int, page_size: int) -> int:
    return pages[position // page_size] * page_size + position % page_size


def pages_of(chunk: Chunk, num_groups: int) -> Sequence[int]:
    """Return a chunk's pages of the layers without a window, or of all layers if they are one group.

    A chunk of a step outside of a scheduler has no pages of the other groups: its page p stands for the pages of
    all groups from p * num_groups on.
    """
    if num_groups == 1 or chunk.window is not None:
        return chunk.pages
    return [page * num_groups for page in chunk.pages]


def rows_of(chunk: Chunk, count: int, num_groups: int) -> tuple[int, Sequence[Sequence[int]]]:
    """Return a chunk's pages of layers with a window, up to slot `count` of its page table: the first slot with
    pages, and the pages of each slot from there on, one for each group after the first of `num_groups`.
    """
    if (window := chunk.window) is not None:
        return window.first, window.rows[: count - window.first]
    return 0, [range(page * num_groups + 1, (page + 1) * num_groups) for page in chunk.pages[:count]]


def block_table(
    tables: Sequence[Sequence[int]], num_pages: Sequence[int], null_page: int
) -> npt.NDArray[np.int32]:
    """Return [R, P]: the pages that hold each row's tokens, its first `num_pages`, padded with the null page."""
    width = max(num_pages)
    pages = chain.from_iterable([table[:n] for table, n in zip(tables, num_pages, strict=True)])
    used = np.fromiter(pages, dtype=np.int32, count=sum(num_pages))
    if len(used) == len(tables) * width:
        return used.reshape(len(tables), width)
    table = np.full((len(tables), width), null_page, dtype=np.int32)
    table[np.arange(width) < np.array(num_pages)[:, None]] = used
    return table


def _more_tables(
    chunks: Sequence[Chunk], ends: Sequence[int], page_size: int, null_page: int, width: int, num_groups: int
) -> npt.NDArray[np.int32]:
    """[num_groups, R, P]: the pages of layers with a window; slots that it has passed have the null page."""
    tables = np.full((num_groups, len(chunks), width), null_page, dtype=np.int32)
    for row, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
        count = (end - 1) // page_size + 1
        first, pages = rows_of(chunk, count, num_groups + 1)
        tables[:, row, first:count] = np.array(pages, dtype=np.int32).T
    return tables
