"""Decode steps through static tensors on a CPU: attention that reads them alone, and replays that call again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention.base import AttentionShape
from engine.attention.batch import AttentionBatch


class GatheringAttention:
    """Each row's whole page table is gathered, and masked by the lengths that the device has: nothing of what a
    batch says on the host is looked at but that all rows are decodes."""

    name = "gathering"
    is_capturable = True

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    @staticmethod
    def unavailable(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        return None

    def prepare(self, batch: AttentionBatch, null_page: int) -> GatheringStep:
        assert batch.num_decodes == len(batch.query_lens)
        return GatheringStep(self._shape, batch)


class GatheringStep:
    def __init__(self, shape: AttentionShape, batch: AttentionBatch) -> None:
        self._shape, self.batch = shape, batch

    def attend(self, pages: torch.Tensor, query: torch.Tensor, window: int | None, *_: Any) -> torch.Tensor:
        table, lens = self.batch.block_table.long(), self.batch.kv_lens.long()[:, None]
        keys, values = pages[:, table].flatten(2, 3).transpose(2, 3)  # [rows, heads, positions, dim]
        places = torch.arange(keys.shape[2])
        mask = places < lens
        if window is not None:
            mask &= places >= lens - window
        # What others left in pages may be NaN, and NaN * 0 is NaN.
        values = torch.where(mask[:, None, :, None], values, 0.0)
        keys = torch.where(mask[:, None, :, None], keys, 0.0)
        grouped = query.reshape(len(query), keys.shape[1], -1, self._shape.head_dim)
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask[:, None, None], scale=self._shape.scale
        )
        return out.reshape(len(query), -1)


class Recording:
    """Replays call the recorded work again: on the same tensors, and on nothing else."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay
