"""The metadata of a step's ragged batch: built once per step, shared by all layers and backends.

rows:        decode rows first           then prefill rows
tokens:      [ a | b | c |               d d d d d | e e e ]          "ragged": no padding
qo_indptr:     0   1   2   3                         8       11

token t of a row at position p:  slot = page_table[p // page_size] * page_size + p % page_size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.pinned import on_device
from engine.attention.state_batch import StateBatch
from engine.scheduling.plan import Chunk

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The ragged batch of one step. R rows, N tokens, P pages in the longest page table.

    A row attends from its chunk's positions to all of its positions so far: causal, the chunk included.
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
    """int64 [N]: the slot each token's KV is written to; slot = page * page_size + offset."""
    positions: torch.Tensor
    """int64 [N]: each token's position in its request."""
    states: StateBatch | None = None
    """The use of recurrent states; None in a model without any."""
    is_bounded: bool = False
    """Whether lengths on the host are upper bounds, as in graphs: those on the device are the rows' own."""

    @classmethod
    def from_chunks(
        cls,
        chunks: Sequence[Chunk],
        page_size: int,
        null_page: int,
        device: torch.device,
        null_slot: int | None = None,
    ) -> AttentionBatch:
        """Build the batch of a plan's chunks (at least one), in their order. `null_slot` is that of the model's
        states; None if it has none.
        """
        query_lens = [chunk.num_tokens for chunk in chunks]
        num_decodes = next((row for row, n in enumerate(query_lens) if n != 1), len(chunks))
        ends = [chunk.start + chunk.num_tokens for chunk in chunks]
        table = _block_table(chunks, [(end - 1) // page_size + 1 for end in ends], null_page)
        if num_decodes == len(chunks):  # Most steps: lists are quicker here than a dozen numpy calls.
            indptr, positions = np.arange(len(chunks) + 1, dtype=np.int32), np.array(ends, dtype=np.int64) - 1
            slots = np.array(
                [_last_slot(chunk.pages, end - 1, page_size) for chunk, end in zip(chunks, ends, strict=True)]
            )
        else:
            lens = np.array(query_lens)
            indptr = np.array([*accumulate(query_lens, initial=0)])
            rows = np.repeat(np.arange(len(chunks)), lens)
            positions = np.arange(indptr[-1]) - indptr[rows] + (np.array(ends) - lens)[rows]
            slots = table[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size

        return cls(
            num_decodes=num_decodes,
            query_lens=query_lens,
            kv_lens_host=ends,
            qo_indptr=on_device(indptr.astype(np.int32, copy=False), device),
            kv_lens=on_device(np.array(ends, dtype=np.int32), device),
            block_table=on_device(table, device),
            slot_mapping=on_device(slots, device),
            positions=on_device(positions, device),
            states=None if null_slot is None else StateBatch.from_chunks(chunks, null_slot, device),
        )


def _last_slot(pages: Sequence[int], position: int, page_size: int) -> int:
    return pages[position // page_size] * page_size + position % page_size


def _block_table(chunks: Sequence[Chunk], num_pages: Sequence[int], null_page: int) -> npt.NDArray[np.int32]:
    """[R, P]: the pages that hold each row's tokens, padded with the null page."""
    width = max(num_pages)
    pages = chain.from_iterable([chunk.pages[:n] for chunk, n in zip(chunks, num_pages, strict=True)])
    used = np.fromiter(pages, dtype=np.int32, count=sum(num_pages))
    if len(used) == len(chunks) * width:
        return used.reshape(len(chunks), width)
    table = np.full((len(chunks), width), null_page, dtype=np.int32)
    table[np.arange(width) < np.array(num_pages)[:, None]] = used
    return table
