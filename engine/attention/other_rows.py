"""The rows of a step that are not long prompts, which have a kernel of their own, as a separate batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from engine.attention.base import AttentionBackend, AttentionStep
from engine.attention.batch import AttentionBatch
from engine.attention.pinned import on_device


class OtherRows:
    """Some rows of a batch, prepared by a backend."""

    def __init__(
        self, batch: AttentionBatch, rows: Sequence[int], backend: AttentionBackend, null_page: int
    ) -> None:
        """`rows`: in order, single tokens first."""
        device, starts = batch.kv_lens.device, [0, *accumulate(batch.query_lens)]
        lens = [batch.query_lens[row] for row in rows]
        at = on_device(np.array(rows, dtype=np.int64), device)
        tokens = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])
        self.tokens = on_device(tokens, device)
        """int64: the index in the step of each of their tokens."""
        own = replace(
            batch,
            num_decodes=sum(row < batch.num_decodes for row in rows),
            query_lens=lens,
            kv_lens_host=[batch.kv_lens_host[row] for row in rows],
            qo_indptr=on_device(np.cumsum([0, *lens], dtype=np.int32), device),
            kv_lens=batch.kv_lens.index_select(0, at),
            block_table=batch.block_table.index_select(0, at),
            slot_mapping=batch.slot_mapping.index_select(0, self.tokens),
            positions=batch.positions.index_select(0, self.tokens),
            more_tables=None,
            more_slots=None,
        )
        self.step: AttentionStep = backend.prepare(own, null_page)
