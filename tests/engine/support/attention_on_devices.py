"""A case of `tests.engine.support.paged_kv` on another device."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from engine.attention.base import AttentionBackend
from engine.attention.batch import AttentionBatch
from engine.attention.reference import ReferenceAttention
from tests.engine.support.paged_kv import Paged


def batch_on(device: torch.device, batch: AttentionBatch) -> AttentionBatch:
    """Return the batch with its tensors on the device."""
    parts = {field.name: getattr(batch, field.name) for field in fields(batch)}
    there: dict[str, Any] = {
        name: part.to(device) for name, part in parts.items() if isinstance(part, torch.Tensor)
    }
    return replace(batch, **there)


def attend_on(device: torch.device, case: Paged, backend: AttentionBackend) -> torch.Tensor:
    """Return the output of `backend` for the case on the device, [N, num_heads * head_dim]."""
    case.attend(ReferenceAttention(case.shape))  # the step's own KV is in the pages now
    step = backend.prepare(batch_on(device, case.batch), case.pages.null_page)
    query = torch.cat(case.queries).to(device)
    return step.attend(case.pages.layer(0).to(device), query, case.window).cpu()
