"""Where each token of a step lies: built once per step, shared by all layers and backends.

rows:        decode rows first           then prefill rows
tokens:      [ a | b | c |               d d d d d | e e e ]          "ragged": no padding
qo_indptr:     0   1   2   3                         8       11

token t of a row at position p:  slot = page_table[p // page_size] * page_size + p % page_size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from engine.plan import Chunk

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The ragged batch of one step. R rows, N tokens, P pages in the longest page table.

    A row attends from its chunk's positions to all of its positions so far: causal, the chunk included.
    """

    num_decodes: int
    """Leading rows with exactly one token. Rows after them may have any number."""
    query_lens: Sequence[int]
    """[R] tokens of each row in this step, on the host."""
    kv_lens_host: Sequence[int]
    """[R] positions 0 .. kv_len of each row have KV once this step's is written, on the host."""
    qo_indptr: torch.Tensor
    """int32 [R + 1]: row r's tokens are qo_indptr[r] .. qo_indptr[r + 1]."""
    kv_lens: torch.Tensor
    """int32 [R], as `kv_lens_host`."""
    block_table: torch.Tensor
    """int32 [R, P]: page ids; entries past a row's own pages hold the null page."""
    slot_mapping: torch.Tensor
    """int64 [N]: where each token's KV is written; slot = page * page_size + offset."""
    positions: torch.Tensor
    """int64 [N]: each token's position in its request."""

    @classmethod
    def from_chunks(
        cls, chunks: Sequence[Chunk], page_size: int, null_page: int, device: torch.device
    ) -> AttentionBatch:
        """The batch of a plan's chunks (at least one), in their order."""
        query_lens = [chunk.num_tokens for chunk in chunks]
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        lens = np.array(query_lens, dtype=np.int64)
        indptr = np.concatenate(([0], np.cumsum(lens)))
        rows = np.repeat(np.arange(len(chunks)), lens)
        positions = np.arange(indptr[-1]) - indptr[rows] + starts[rows]
        table = _block_table(chunks, (starts + lens + page_size - 1) // page_size, null_page)
        slots = table[rows, positions // page_size] * page_size + positions % page_size
        return cls(
            num_decodes=next((row for row, n in enumerate(query_lens) if n != 1), len(chunks)),
            query_lens=query_lens,
            kv_lens_host=(starts + lens).tolist(),
            qo_indptr=torch.from_numpy(indptr.astype(np.int32)).to(device, non_blocking=True),
            kv_lens=torch.from_numpy((starts + lens).astype(np.int32)).to(device, non_blocking=True),
            block_table=torch.from_numpy(table.astype(np.int32)).to(device, non_blocking=True),
            slot_mapping=torch.from_numpy(slots).to(device, non_blocking=True),
            positions=torch.from_numpy(positions).to(device, non_blocking=True),
        )


def _block_table(chunks: Sequence[Chunk], num_pages: Ints, null_page: int) -> Ints:
    """[R, P] the pages that hold each row's tokens, filled up with the null page."""
    table = np.full((len(chunks), int(num_pages.max())), null_page, dtype=np.int64)
    used = np.arange(table.shape[1]) < num_pages[:, None]
    pages = (chunk.pages[:n] for chunk, n in zip(chunks, num_pages.tolist(), strict=True))
    table[used] = np.fromiter(chain.from_iterable(pages), dtype=np.int64, count=int(num_pages.sum()))
    return table
