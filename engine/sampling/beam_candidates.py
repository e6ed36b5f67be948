"""What beam search asks of the logits: not one token but the best continuations, with their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.logprobs import TokenLogprobs
from engine.sampling.row import SamplingRow


def is_beam_row(row: SamplingRow) -> bool:
    """Whether a beam search wants this row's candidates."""
    return row.request.sampling.beams is not None


def beam_candidates(logprobs: torch.Tensor, rows: Sequence[SamplingRow]) -> list[TokenLogprobs]:
    """For each row of `logprobs` (float32 [R, V], adjusted) the best token, and as `top` all that may be needed.

    Adjusting them gives no distribution any more: transformers searches them as they are, and so do we.
    """
    counts = [_count(row) for row in rows]
    best = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    tokens, values = best.indices.tolist(), best.values.tolist()
    return [
        TokenLogprobs(ids[0], scores[0], tuple(zip(ids[:count], scores[:count], strict=True)))
        for ids, scores, count in zip(tokens, values, counts, strict=True)
    ]


def _count(row: SamplingRow) -> int:
    beams = row.request.sampling.beams
    assert beams is not None
    return beams.num_candidates(len(row.request.stop_ids))
