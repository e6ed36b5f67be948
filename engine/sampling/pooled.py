"""Computes the results of pooled requests from a step's hidden states: see `engine.values.pooling`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.attention.pinned import on_device, on_host
from engine.values.plan import StepPlan


class Head(Protocol):
    """The part of a decoder after its layers."""

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [R, hidden_size] to float32 of the same shape, normed as for logits."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [R, hidden_size] to float32 [R, vocab_size]."""


@dataclass(frozen=True, slots=True)
class PooledRow:
    """The last token of a request's prompt in a step."""

    request_id: str
    row: int
    """Row of the step's hidden states."""
    token_ids: Sequence[int]
    """As in `Pooling`."""


def rows_to_pool(plan: StepPlan) -> list[PooledRow]:
    """Return the rows of the plan's pooled chunks."""
    if not plan.pooled:
        return []
    rows, end = [], 0
    pooled = {chunk.request.request_id for chunk in plan.pooled}
    for chunk in plan.chunks:
        end += chunk.num_tokens
        pooling = chunk.request.pooling
        if pooling is not None and chunk.request.request_id in pooled:
            rows.append(PooledRow(chunk.request.request_id, end - 1, pooling.token_ids))
    return rows


def pool(head: Head, hidden: torch.Tensor, wanted: Sequence[PooledRow]) -> dict[str, bytes]:
    """Return each request's values as float32, little endian; no bytes if they are not finite.

    hidden: [N, hidden_size], the step's.
    """
    states = [row for row in wanted if not row.token_ids]
    scored = [row for row in wanted if row.token_ids]
    found: dict[str, bytes] = {}
    if states:
        values = on_host(head.normed(_rows(hidden, states)).float())
        found |= {row.request_id: packed(own) for row, own in zip(states, values, strict=True)}
    if scored:
        logits = head.logits(_rows(hidden, scored))
        parts = [_columns(own, row.token_ids).softmax(-1) for row, own in zip(scored, logits, strict=True)]
        together = on_host(torch.cat(parts)).split([len(row.token_ids) for row in scored])
        found |= {row.request_id: packed(own) for row, own in zip(scored, together, strict=True)}
    return found


def _rows(hidden: torch.Tensor, wanted: Sequence[PooledRow]) -> torch.Tensor:
    return hidden[on_device(np.array([row.row for row in wanted]), hidden.device)]


def _columns(logits: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    return logits[on_device(np.array(token_ids), logits.device)]


def packed(values: torch.Tensor) -> bytes:
    """Return float32 values on the host, little endian; no bytes if one is not finite."""
    return values.numpy().astype("<f4", copy=False).tobytes() if bool(values.isfinite().all()) else b""
