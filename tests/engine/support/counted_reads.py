"""Counts how often a drafter reads draft tokens on the host."""

from __future__ import annotations

import pytest
import torch

from engine.attention.pinned import on_host
from engine.runner import draft_model


def noted_reads(patch: pytest.MonkeyPatch) -> list[int]:
    """Note the number of tokens of each copy to the host."""
    seen: list[int] = []

    def noting(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.numel())
        return on_host(tokens)

    patch.setattr(draft_model, "on_host", noting)
    return seen
