"""Attention over latent KV by absorbed queries, as a layer computes it."""

from __future__ import annotations

import torch

from engine.attention.base import AttentionStep
from engine.attention.expanded import Absorbed, HeadsQuery
from engine.attention.kv_pages import KVScales


def absorbing(pages: torch.Tensor, expansion: torch.Tensor, plain_dim: int, scales: KVScales) -> Absorbed:
    """Return the function that a layer with these pages and this expansion gives to a step."""
    to_keys, to_values = expansion.tensor_split((plain_dim,), dim=1)

    def absorbed(step: AttentionStep, query: HeadsQuery) -> torch.Tensor:
        latent = torch.einsum("nhp,hpr->nhr", query.plain, to_keys)
        attended = step.attend(pages, torch.cat((latent, query.turned), -1), None, scales)
        return torch.einsum("nhr,hvr->nhv", attended.view(latent.shape), to_values)

    return absorbed
