"""Adjusts a request's logits before a token is chosen: penalties, bias, forbidden ends.

This is the reference, which reads the whole history each time. The samplers of CPUs and GPUs keep counts instead:
`engine.sampling.token_counts`.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from engine.sampling.token_counts import is_penalized
from engine.values.sampling_params import SamplingParams
from engine.values.sampling_row import SamplingRow


def is_adjusted(row: SamplingRow) -> bool:
    """Whether `adjust` would change anything."""
    params = row.request.sampling
    return bool(is_penalized(params) or params.logit_bias or must_continue(row))


def adjust(logits: torch.Tensor, row: SamplingRow, eos_token_ids: Collection[int]) -> None:
    """Adjust one row of logits, float [V], in place.

    1. The repetition penalty, over prompt and output, divides positive logits and multiplies negative ones
       (Keskar et al. 2019, arXiv:1909.05858).
    2. The presence and frequency penalties, over the output, are subtracted once, and once per occurrence.
    3. The logit bias is added after them, so that penalties do not change its effect.
    4. Before `min_tokens`, tokens that would end the request become impossible.
    """
    params = row.request.sampling
    if params.repetition_penalty != 1.0:
        _penalize_repetition(logits, row.history(), params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.num_output:
        seen, counts = np.unique(np.asarray(row.output()), return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts
        logits[_index(seen, logits)] -= torch.from_numpy(penalty).to(logits)
    if params.logit_bias:
        known = {token: bias for token, bias in params.logit_bias.items() if token < len(logits)}
        logits[_index(list(known), logits)] += torch.tensor(list(known.values())).to(logits)
    if must_continue(row):
        ends = forbidden_ends(params, eos_token_ids)
        logits[_index([token for token in ends if token < len(logits)], logits)] = -torch.inf


def forbidden_ends(params: SamplingParams, eos_token_ids: Collection[int]) -> set[int]:
    """Return the tokens that are forbidden before `min_tokens`."""
    return {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}


def must_continue(row: SamplingRow) -> bool:
    """Whether the row's token must not end the request.

    False with a grammar, which may allow only an end: `engine.sampling.masks` handles that.
    """
    return row.num_output < row.request.sampling.min_tokens and row.request.constraint is None


def _penalize_repetition(logits: torch.Tensor, tokens: list[int], penalty: float) -> None:
    seen = _index(np.unique(np.asarray(tokens)), logits)
    values = logits[seen]
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _index(tokens: object, logits: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(tokens, dtype=torch.int64, device=logits.device)
