"""Choosing the next token of each request from the model's logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from engine.plan import TokenLogprobs
from engine.request import Request
from engine.sampling.adjust import adjust, is_adjusted
from engine.sampling.choose import draw, probabilities
from engine.sampling.noise import uniform

INVALID = -1
"""In place of a token: the row's logits hold NaN or infinity, or everything was forbidden."""


class Sampler:
    """Samples one token per row. Stateless: noise is a function of (seed, position), penalties of the request.

    The order of things, row by row:
    1. log-probabilities are taken from the model's own logits
    2. penalties, bias, forbidden ends (`engine.sampling.adjust`)
    3. temperature 0: the most likely token, the lowest id among equals
    4. else temperature, top-k, top-p, min-p (`engine.sampling.choose`), then the token under the noise
    """

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos = frozenset(eos_token_ids)

    def sample(
        self, logits: torch.Tensor, requests: Sequence[Request]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """One token per row, and log-probabilities where asked for.

        logits: float32 [R, V], overwritten; row r belongs to requests[r]. A row that has no valid choice gets
        `INVALID` and no log-probabilities; the other rows are as if it were not there.
        """
        wanting = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
        logprobs = torch.log_softmax(logits[wanting].float(), dim=-1) if wanting else None
        for row, request in enumerate(requests):
            if is_adjusted(request):
                adjust(logits[row], request, self._eos)
        best, tokens = logits.max(-1)  # NaN and infinity win the maximum
        valid = torch.isfinite(best)
        drawing = [row for row, request in enumerate(requests) if not request.sampling.is_greedy]
        if drawing:
            drawing = [row for row, is_valid in zip(drawing, valid[drawing].tolist(), strict=True) if is_valid]
        if drawing:
            tokens[drawing] = _draw_rows(logits[drawing], [requests[row] for row in drawing])
        chosen: list[int] = torch.where(valid, tokens, INVALID).tolist()
        reports: list[TokenLogprobs | None] = [None] * len(requests)
        if logprobs is not None:
            for row, report in zip(wanting, _report(logprobs, requests, wanting, chosen), strict=True):
                reports[row] = report
        return chosen, reports


def _draw_rows(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    noise = uniform([request.seed for request in requests], [request.num_output for request in requests])
    weights = probabilities(logits, [request.sampling for request in requests])
    return draw(weights, torch.from_numpy(noise).to(logits.device))


def _report(
    logprobs: torch.Tensor, requests: Sequence[Request], rows: Sequence[int], chosen: Sequence[int]
) -> list[TokenLogprobs | None]:
    """For row i of `logprobs` (float32 [len(rows), V]): the chosen token's and the best ones'."""
    counts = [requests[row].sampling.logprobs or 0 for row in rows]
    best = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    tokens = torch.tensor([max(chosen[row], 0) for row in rows], device=logprobs.device)
    of_chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    reports: list[TokenLogprobs | None] = []
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if chosen[row] == INVALID:
            reports.append(None)
            continue
        top = zip(best.indices[index, :count].tolist(), best.values[index, :count].tolist(), strict=True)
        reports.append(TokenLogprobs(chosen[row], of_chosen[index], tuple(top)))
    return reports
