"""Operations of a few families in addition to the common decoder, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.model_parts.parts import AttentionConfig, LaterScale, Scales
from engine.parallel.collective import Collective


def norm_all_heads(
    heads: torch.Tensor, weight: torch.Tensor, num_heads: int, eps: float, ranks: Collective
) -> torch.Tensor:
    """Norm the queries of a token together, over all ranks, and its keys likewise (OLMo 2, arXiv:2501.00656).

    heads: [N, num_heads + 2 * num_kv_heads, head_dim], this rank's queries, keys and values
    weight: [num_heads + num_kv_heads, head_dim]
    """
    query, key, value = heads.tensor_split((num_heads, len(weight)), dim=1)
    # Ranks have equally many heads, so the mean of their means is the mean of all; shared keys count equally.
    means = torch.stack([part.float().square().mean((1, 2)) for part in (query, key)])
    factors = (ranks.sum(means) / ranks.shard.size + eps).rsqrt()[:, :, None, None]
    normed = [(part.float() * factor).to(heads.dtype) for part, factor in zip((query, key), factors, strict=True)]
    return torch.cat(((torch.cat(normed, 1) * weight).to(heads.dtype), value), 1)


def normed_heads(heads: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Norm each of [N, heads, head_dim] by itself; `weight`: [heads, head_dim], or None for no norms."""
    if weight is None:
        return heads
    return (F.rms_norm(heads, heads.shape[2:], eps=eps) * weight).to(heads.dtype)


def with_normed_values(heads: torch.Tensor, shape: AttentionConfig, eps: float) -> torch.Tensor:
    """Return a token's queries, keys and values, with values normed without weights. Without a projection of their
    own, values are the keys before norm and rotation (Gemma 4).
    """
    rest, value = heads.tensor_split((-shape.num_kv_heads,), dim=1)
    normed = F.rms_norm(value, value.shape[2:], eps=eps)
    return torch.cat((rest if shape.projects_values else heads, normed), 1)


def later_scales(scale: LaterScale, positions: torch.Tensor) -> torch.Tensor:
    """Return the factors of queries at int64 [N] positions, float32 [N, 1, 1]."""
    periods = torch.div(positions + scale.first, scale.period, rounding_mode="floor")
    return (1 + scale.beta * torch.log1p(periods.float()))[:, None, None]


def scaled_logits(logits: torch.Tensor, scales: Scales) -> torch.Tensor:
    """Multiply and cap float32 logits in place."""
    if scales.logits != 1:
        logits.mul_(scales.logits)
    if scales.logits_cap is not None:
        logits.div_(scales.logits_cap).tanh_().mul_(scales.logits_cap)
    return logits
