"""Decode steps through static tensors on a CPU: attention that reads them alone, and replays that call again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

from engine.attention.base import AttentionBackend, AttentionShape, AttentionStep
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales
from engine.attention.layer_groups import GroupedAttention, shapes
from engine.attention.reference import ReferenceAttention
from engine.loading import load_model as loading
from engine.loading.load_model import load_model
from engine.program import load_with_draft, load_with_layer
from engine.runner.model_runner import ModelRunner
from engine.settings.config import EngineConfig
from tests.engine.support.runner_parts import with_attention


class GatheringAttention:
    """Of steps of decodes, and of those whose lengths on the host are bounds, each row's whole page table is
    gathered, and masked by the lengths that the device has: nothing of what a batch says on the host is looked at.
    Other steps are the reference's.
    """

    name = "gathering"
    is_capturable = captures_prompts = True
    plans_by_bounds = spreads_prompts = False

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    @staticmethod
    def unavailable(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        return None

    def prepare(self, batch: AttentionBatch, null_page: int) -> AttentionStep:
        if batch.num_decodes < len(batch.query_lens) and not batch.is_bounded:
            return ReferenceAttention(self._shape).prepare(batch, null_page)
        return GatheringStep(self._shape, batch)


class GatheringStep:
    def __init__(self, shape: AttentionShape, batch: AttentionBatch) -> None:
        self._shape, self.batch = shape, batch

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch, tokens, num_rows = self.batch, torch.arange(len(query)), len(self.batch.kv_lens)
        begins, ends = batch.qo_indptr[:-1], batch.qo_indptr[1:].contiguous()
        rows = torch.searchsorted(ends, tokens, right=True).clamp(max=num_rows - 1)  # padding: any row
        lens = (batch.kv_lens - (ends - begins) + 1 - begins)[rows] + tokens
        table, lens = batch.block_table[rows].long(), lens.clamp(min=1)[:, None]
        keys, values = self._gathered(pages, table)
        places = torch.arange(keys.shape[2])
        mask = places < lens
        if window is not None:
            mask &= places >= lens - window
        # What others left in pages may be NaN, and NaN * 0 is NaN.
        values = torch.where(mask[:, None, :, None], values, 0.0)
        keys = torch.where(mask[:, None, :, None], keys, 0.0)
        grouped = query.reshape(len(query), keys.shape[1], -1, self._shape.head_dim)
        if sinks is not None:  # a key of zeros whose score the mask adds, and a value of zeros
            keys, values = (F.pad(part, (0, 0, 0, 1)) for part in (keys, values))
            per_head = sinks.view(1, keys.shape[1], -1, 1).expand(len(query), -1, -1, 1)
            seen = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)[:, None, None]
            mask = torch.cat((seen.expand(*per_head.shape[:3], -1), per_head), -1)
        else:
            mask = mask[:, None, None]
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=self._shape.scale)
        return out.reshape(len(query), -1)

    def attend_with_sums(
        self, pages: torch.Tensor, query: torch.Tensor, scales: KVScales = UNSCALED
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of one token, which see all that the device says."""
        table, lens = self.batch.block_table.long(), self.batch.kv_lens[:, None]
        keys, values = self._gathered(pages, table)
        seen = (torch.arange(keys.shape[2]) < lens)[:, None, None]
        grouped = query.reshape(len(query), keys.shape[1], -1, self._shape.head_dim)
        keys = torch.where(seen.transpose(2, 3), keys, 0.0)
        scores = (grouped @ keys.transpose(2, 3) * self._shape.scale).masked_fill(~seen, -torch.inf)
        sums = scores.logsumexp(-1)
        weights = torch.where(seen, torch.exp(scores - sums[..., None]), 0.0)
        out = weights @ torch.where(seen.transpose(2, 3), values, 0.0)
        return out.reshape(*query.shape[:2], -1), sums.flatten(1)

    def _gathered(self, pages: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of all positions, each [tokens, heads, positions, dim]."""
        parts = pages[:, table].flatten(2, 3).transpose(2, 3)
        return parts[0], parts[-1][..., : self._shape.value_dim]


class Recording:
    """Replays call the recorded work again: on the same tensors, and on nothing else."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = self.num_cuts = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay

    def cut(self, outside: Callable[[], None]) -> None:
        self.num_cuts += 1
        outside()


class SpreadingAttention(GatheringAttention):
    """The same, which would rather have a row for each token of short prompts."""

    spreads_prompts = True


def record_as_on_gpus(patch: pytest.MonkeyPatch) -> list[Recording]:
    """Have models, draft models and layers that are loaded on CPUs record their steps; returns what each of
    them records with. They need `cuda_graphs: lazy`.
    """
    made: list[Recording] = []

    def record(device: object) -> Recording:
        made.append(Recording())
        return made[-1]

    def gathering(names: str, shape: AttentionShape, *_: object) -> GatheringAttention:
        return GatheringAttention(shape)

    for module in (loading, load_with_layer):
        patch.setattr(module, "choose_backend", gathering)
        patch.setattr(module, "why_not", lambda *_: None)
    for module in (loading, load_with_draft):
        patch.setattr(module, "why_none", lambda *_: None)
    for module in (loading, load_with_draft, load_with_layer):
        patch.setattr(module, "CudaCapture", record)
    return made


def graphed(
    config: EngineConfig, max_tokens: int = 0, widths: Sequence[int] = (), *, spreads: bool = False
) -> tuple[ModelRunner, Recording]:
    """Return a runner with `config.kv_pages` pages whose plain decodes are replayed, and the recording. For
    `max_tokens` and `widths` see `ModelRunner.add_token_graphs`; `spreads`: whether attention asks for a row for
    each token of short prompts.
    """
    loaded = load_model(config)
    model = loaded.model_config
    shape = AttentionShape.of(model.attention, model.windows, config.page_size)
    attention: AttentionBackend = (SpreadingAttention if spreads else GatheringAttention)(shape)
    if loaded.layer_groups is not None:
        attention = GroupedAttention(*map(GatheringAttention, shapes(shape)))
    runner = with_attention(loaded, attention)
    recording = Recording()
    runner.add_graphs(config.max_running, recording)
    if max_tokens or widths:
        runner.add_token_graphs(config.max_running, max_tokens, widths, recording)
    runner.add_host_pages(loaded.host_memory.num_pages)
    return runner, recording
