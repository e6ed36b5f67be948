"""The inputs of recorded steps of ragged rows: tokens and rows, padded, in tensors with fixed addresses.

tokens   [ a a a | b | c c | . . ]     padding: token 0 at position 0, whose KV goes to the page of empty rows
rows     [ a | b | c | . ]             an empty row has no tokens and no KV
"""

from __future__ import annotations

import torch

from engine.attention.batch import AttentionBatch


class StepInputs:
    """The inputs of steps of up to `max_tokens` tokens, and `max_rows` rows if attention is recorded too."""

    def __init__(
        self,
        max_tokens: int,
        empty_slot: int,
        device: torch.device,
        max_rows: int = 0,
        max_pages: int = 0,
        num_groups: int = 1,
    ) -> None:
        """empty_slot: the slot of padding's KV; max_pages: of a row's page table; num_groups: groups of layers
        with their own page tables.
        """
        padding = torch.tensor([[0], [0], *[[empty_slot]] * num_groups])
        self._padding = padding.to(device)
        self._tokens = padding.repeat(1, max_tokens).to(device)
        self._indptr = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._kv_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(num_groups, max_rows, max_pages, dtype=torch.int32, device=device)

    def write_tokens(self, ids: torch.Tensor, batch: AttentionBatch, size: int) -> None:
        """Write a step's tokens, int64 [N], and pad them to `size`."""
        count = len(ids)
        more = () if batch.more_slots is None else batch.more_slots.unbind()
        torch.stack((ids, batch.positions, batch.slot_mapping, *more), out=self._tokens[:, :count])
        if count < size:
            self._tokens[:, count:size] = self._padding

    def write_rows(self, batch: AttentionBatch, size: int) -> None:
        """Write a step's rows, and pad them to `size`."""
        count, width = batch.block_table.shape
        self._indptr[: count + 1] = batch.qo_indptr
        self._kv_lens[:count] = batch.kv_lens
        self._tables[0, :count, :width] = batch.block_table
        if batch.more_tables is not None:
            self._tables[1:, :count, :width] = batch.more_tables
        if count < size:
            self._indptr[count + 1 : size + 1] = batch.qo_indptr[-1]
            self._kv_lens[count:size].zero_()

    def token_ids(self, size: int) -> torch.Tensor:
        """Return the tokens of a step of `size`, including padding, int64 [size]."""
        return self._tokens[0, :size]

    def batch(self, size: int, num_rows: int = 0, width: int = 0, longest: int = 0) -> AttentionBatch:
        """Return the batch of a step of `size` tokens in rows of up to `width` tokens and `longest` positions."""
        has_more = len(self._tables) > 1
        return AttentionBatch(
            num_decodes=num_rows if width == 1 else 0,
            query_lens=[width] * num_rows,
            kv_lens_host=[longest] * num_rows,
            qo_indptr=self._indptr[: num_rows + 1],
            kv_lens=self._kv_lens[:num_rows],
            block_table=self._tables[0, :num_rows],
            slot_mapping=self._tokens[2, :size],
            positions=self._tokens[1, :size],
            is_bounded=True,
            more_tables=self._tables[1:, :num_rows] if has_more else None,
            more_slots=self._tokens[3:, :size] if has_more else None,
        )
