"""The device's rows of decoding requests: the state that a step reads, and advances for the next step."""

from __future__ import annotations

from typing import Any

import torch

from engine.attention.batch import AttentionBatch
from engine.attention.pinned import on_device
from engine.attention.state_batch import StateBatch
from engine.graphs.row_assignment import (
    IN_USE,
    INVERSE,
    MIN_P,
    NUM_PROMPT,
    POSITION,
    SEED,
    STATE,
    TABLE,
    TOKEN,
    TOP_K,
    TOP_P,
    RowChanges,
    RowLayout,
)
from engine.sampling.graph_chooser import GraphChooser, RowParams


class DeviceRows:
    """All fields of all rows, in one tensor whose address never changes, so that graphs can read and advance it.

    A step of n rows reads the first n. Empty rows compute token 0 at position 0 in each step, and attend only to
    the KV that they have just written to the page of empty rows.
    """

    def __init__(self, layout: RowLayout, device: torch.device, *, has_states: bool = False) -> None:
        """`has_states`: whether the model has recurrent layers."""
        self._layout = layout
        self._words = torch.zeros(layout.num_words, dtype=torch.int32, device=device)
        size, field = layout.max_rows, layout.field

        def words(index: int, width: int = 1) -> torch.Tensor:
            return self._words[field(index) : field(index) + width * size]

        inverse, top_p, min_p = (words(index, 2).view(torch.float64) for index in (INVERSE, TOP_P, MIN_P))
        self._params = RowParams(words(SEED, 2).view(torch.int64), inverse, words(TOP_K), top_p, min_p)
        self._positions, self._tokens, self._in_use, self._num_prompt = (
            words(index) for index in (POSITION, TOKEN, IN_USE, NUM_PROMPT)
        )
        groups = layout.num_groups
        self._tables = words(TABLE, groups * layout.max_pages).view(groups, size, layout.max_pages)
        self._ids, self._long_positions, self._num_output = torch.zeros(3, size, dtype=torch.int64, device=device)
        self._slots = torch.zeros(groups, size, dtype=torch.int64, device=device)
        self._kv_lens = torch.zeros(size, dtype=torch.int32, device=device)
        self.kernels = row_kernels(device)
        self._state_words = words(STATE)
        self._states = torch.zeros(size, dtype=torch.int64, device=device) if has_states else None
        self._qo_indptr = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.sampled = torch.zeros(size, dtype=torch.int64, device=device)
        """int64 [max_rows]: tokens chosen by the last step, -1 if no choice was valid."""
        self.clear()

    def clear(self) -> None:
        """Empty all rows."""
        self._words.zero_()
        self._tables.fill_(self._layout.null_page)
        self._tables[:, :, 0] = self._layout.empty_page
        self._state_words.fill_(self._layout.empty_state)

    def replace(self, fields: torch.Tensor, tables: torch.Tensor, later: torch.Tensor | None) -> None:
        """Replace all rows by others, without recurrent states and in one group of layers.

        fields: int32, all words before the page tables; tables: int32 [R, P], those of the first rows; later:
        int64 [R], to be added to their positions.
        """
        self.clear()
        count, width = tables.shape
        self._words[: len(fields)] = fields
        self._tables[0, :count, :width] = tables
        if later is not None:
            self._positions[:count] += later

    def write(self, changes: RowChanges, before: torch.Tensor | None) -> None:
        """Bring the rows up to date for a step; `before` holds the tokens that the previous step sampled."""
        if changes.is_reset:
            self.clear()
        if changes.packet is None:
            return
        count = changes.num_words
        sent = on_device(changes.packet, self._words.device)
        at, values = sent[: 2 * count].view(2, count)
        self._words.index_copy_(0, at, values.int())
        rows, sources = sent[2 * count :].view(2, -1)
        if before is not None and len(rows):
            # A request without a valid choice has ended, so any token will do for its row.
            self._tokens.index_copy_(0, rows, before.index_select(0, sources).clamp(min=0).int())

    def enter(self, count: int) -> None:
        """Compute the inputs of a step of the first `count` rows: `token_ids`, `batch`, and those of `choose`."""
        if self._states is not None:
            self._states[:count].copy_(self._state_words[:count])
        if self.kernels is not None:
            self.kernels.enter(*self._arguments(), count, self._layout.page_size)
            return
        size, positions = self._layout.page_size, self._positions[:count].long()
        pages = self._tables[:, torch.arange(count, device=positions.device), positions // size].long()
        self._ids[:count] = self._tokens[:count]
        self._long_positions[:count] = positions
        self._kv_lens[:count] = self._positions[:count] + 1
        self._slots[:, :count] = pages * size + positions % size
        self._num_output[:count] = positions + 1 - self._num_prompt[:count]

    def batch(self, count: int, longest: int) -> AttentionBatch:
        """Return the batch of the first `count` rows, which the host knows to have up to `longest` positions.

        Their page tables are cut to this length, because some packages use the width of a table as a bound.
        """
        num_pages = -(-longest // self._layout.page_size)
        has_more = self._layout.num_groups > 1
        return AttentionBatch(
            num_decodes=count,
            query_lens=[1] * count,
            kv_lens_host=[longest] * count,
            qo_indptr=self._qo_indptr[: count + 1],
            kv_lens=self._kv_lens[:count],
            block_table=self._tables[0, :count, :num_pages],
            slot_mapping=self._slots[0, :count],
            positions=self._long_positions[:count],
            is_bounded=True,
            more_tables=self._tables[1:, :count, :num_pages] if has_more else None,
            more_slots=self._slots[1:, :count] if has_more else None,
            states=None if self._states is None else StateBatch.of_decodes(self._states[:count]),
        )

    def token_ids(self, count: int) -> torch.Tensor:
        """Return the tokens that the first rows compute, int64 [count]."""
        ids: torch.Tensor = self._ids[:count]
        return ids

    def choose(self, count: int, logits: torch.Tensor, choose: GraphChooser, *, cuts: bool) -> torch.Tensor:
        """Return the tokens of the first rows, int64 [count]; logits: [count, V]; cuts: as `GraphChooser` says."""
        params = RowParams(*(values[:count] for values in self._params))
        return choose(logits, params, self._num_output[:count], cuts=cuts)

    def advance(self, count: int, tokens: torch.Tensor) -> None:
        """Advance the first rows by their tokens, int64 [count]; negative ones belong to requests that end."""
        if self.kernels is not None:
            self.kernels.leave(self._arguments()[0], tokens, self.sampled, count)
            return
        in_use = self._in_use[:count]
        self.sampled[:count].copy_(tokens)
        self._tokens[:count].copy_(tokens.clamp(min=0) * in_use)
        self._positions[:count].copy_((self._positions[:count] + 1) * in_use)

    def _arguments(self) -> tuple[Any, Any]:
        """Return the rows' words and the inputs of steps, as arguments of the kernels."""
        kernels = self.kernels
        words = kernels.RowWords(self._tokens, self._positions, self._in_use, self._num_prompt, self._tables)
        inputs = self._ids, self._long_positions, self._kv_lens, self._slots, self._num_output
        return words, kernels.RowInputs(*inputs)


def row_kernels(device: torch.device) -> Any:
    """Return the module of the rows' Triton kernels on a GPU where Triton imports; None for plain torch."""
    if device.type == "cuda":
        try:
            from engine.kernels.triton import rows
        except ImportError:  # A warning was logged when the sampler was chosen.
            return None
        return rows
    return None
