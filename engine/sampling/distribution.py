"""Draws tokens from logits: temperature, top-k, top-p, min-p, then inversion of the distribution function.

Everything is computed row by row in float64 without mixing rows, so a row's token does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.values.sampling_params import SamplingParams

_CANDIDATES = 256
"""Number of most likely tokens that are ranked at first, for top-k and top-p."""


def probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the weights by which tokens are drawn: float64 [R, V], not normalised; truncated tokens have 0.

    logits: float [R, V], each row with a finite maximum; params: one per row, with temperature > 0. Applied in
    order: temperature; top-k; top-p of the tokens that top-k kept, renormalised (Holtzman et al. 2019,
    arXiv:1904.09751); min-p (Nguyen et al. 2024, arXiv:2407.01082). Among equally likely tokens the lower id is
    kept first.
    """
    scaled = logits.double()
    # Subtract the maximum first: dividing by a tiny temperature then overflows only to -inf, never to inf.
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / _column([p.temperature for p in params], scaled)
    weights = scaled.exp()
    truncated = [row for row, p in enumerate(params) if p.top_k or p.top_p < 1.0]
    if truncated:
        top_k = _column([params[row].top_k for row in truncated], weights)
        top_p = _column([params[row].top_p for row in truncated], weights)
        weights[truncated] = _truncate(weights[truncated], top_k, top_p)
    if any(p.min_p > 0.0 for p in params):
        least = _column([p.min_p for p in params], weights) * weights.amax(-1, keepdim=True)
        weights = torch.where(weights >= least, weights, 0.0)
    return weights


def draw(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulated weight exceeds noise * total: int64 [R].

    noise: float64 [R], in [0, 1).
    Tokens are cumulated in vocabulary order: in order of probability, two nearly equal tokens that swap ranks by a
    rounding error would swap intervals, and the same noise would give another token.
    """
    cumulated = weights.cumsum(-1)
    total = cumulated[:, -1:]
    # Rounding may lift noise * total to the total itself, which no token exceeds.
    below = torch.nextafter(total, torch.zeros_like(total))
    wanted = torch.minimum(noise[:, None] * total, below)
    return torch.searchsorted(cumulated, wanted, right=True)[:, 0]


def truncate(
    weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, num_ranked: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply top-k, then top-p: return weights float64 [R, V] with 0 for all other tokens, and which rows are
    certain, bool [R]. Nothing waits for the device.

    top_k: [R, 1], 0 for no limit; top_p: float64 [R, 1]; num_ranked: how many of the most likely tokens are
    ranked, None for all. Rows whose result may differ from that of ranking all tokens are not certain.
    """
    vocabulary = weights.shape[1]
    width = min(num_ranked or vocabulary, vocabulary)
    top_k = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary)
    if width < vocabulary:
        tokens = weights.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
    else:
        tokens = torch.arange(vocabulary, device=weights.device).expand_as(weights)
    ranked, order = weights.gather(-1, tokens).sort(dim=-1, descending=True, stable=True)
    kept = _kept(weights, ranked, top_k, top_p)
    out = torch.zeros_like(weights).scatter(-1, tokens.gather(-1, order), torch.where(kept, ranked, 0.0))
    if width == vocabulary:
        return out, torch.ones_like(kept[:, 0])
    least_kept = ranked.gather(-1, kept.sum(-1, keepdim=True) - 1)
    return out, ((least_kept > ranked[:, -1:]) & ((top_k <= width) | (top_k == vocabulary)))[:, 0]


def _truncate(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Rank a few tokens, which is nearly always enough; compute the other rows again with all tokens."""
    out, certain = truncate(weights, top_k, top_p, _CANDIDATES)
    if again := (~certain).nonzero()[:, 0].tolist():
        out[again], _ = truncate(weights[again], top_k[again], top_p[again])
    return out


def _kept(weights: torch.Tensor, ranked: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return which of the ranked tokens stay: bool [R, ranks], True for leading ones, at least the first.

    weights: [R, V], all tokens; ranked: [R, ranks], the most likely of them, in order.
    """
    num_ranks = ranked.shape[1]
    within_k = torch.arange(num_ranks, device=ranked.device) < top_k
    cumulated = ranked.cumsum(-1)
    of_k = cumulated.gather(-1, top_k.clamp(max=num_ranks).long() - 1)
    wanted = top_p * torch.where(top_k < weights.shape[1], of_k, weights.sum(-1, keepdim=True))
    # A top_p of 1 keeps all tokens; the comparison by itself would drop those too unlikely to change the sum.
    kept = within_k & ((cumulated - ranked < wanted) | (top_p >= 1.0))
    kept[:, 0] = True
    return kept


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
