"""The candidates of beam search: the best tokens of each row, with their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.pinned import on_host
from engine.values.logprobs import TokenLogprobs
from engine.values.sampling_row import SamplingRow


def is_beam_row(row: SamplingRow) -> bool:
    """Whether the row belongs to a beam search, which needs candidates."""
    return row.request.sampling.beams is not None


def beam_candidates(logprobs: torch.Tensor, rows: Sequence[SamplingRow]) -> list[TokenLogprobs]:
    """Return each row's best token, and as `top` as many as the search may need.

    logprobs: float32 [R, V], adjusted.
    Adjusted log-probabilities are no longer a distribution; like transformers, the search uses them unchanged.
    """
    counts = [_count(row) for row in rows]
    best = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    tokens, values = on_host(best.indices).tolist(), on_host(best.values).tolist()
    return [
        TokenLogprobs(ids[0], scores[0], tuple(zip(ids[:count], scores[:count], strict=True)))
        for ids, scores, count in zip(tokens, values, counts, strict=True)
    ]


def _count(row: SamplingRow) -> int:
    beams = row.request.sampling.beams
    assert beams is not None
    return beams.num_candidates(len(row.request.stop_ids))
