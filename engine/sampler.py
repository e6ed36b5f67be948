"""Choosing the next token of each request from the model's logits."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import torch

from engine.kernels import native
from engine.plan import GRAMMAR_FAILED, TokenLogprobs
from engine.sampling.adjust import adjust, is_adjusted
from engine.sampling.candidates import candidates, is_searching
from engine.sampling.choose import draw, probabilities
from engine.sampling.masks import GrammarMasks
from engine.sampling.native import NativeSampler
from engine.sampling.noise import uniform
from engine.sampling.report import OwnLogprobs
from engine.sampling.row import Row

INVALID = -1
"""In place of a token: the row's logits hold NaN or infinity, or everything was forbidden."""


class Sampler:
    """Samples one token per row. Stateless: noise is a function of (seed, position), penalties of the request.

    The order of things, row by row:
    1. log-probabilities are taken from the model's own logits
    2. penalties, bias, forbidden ends (`engine.sampling.adjust`)
    3. what the request's grammar forbids becomes impossible (`engine.sampling.masks`)
    4. temperature 0: the most likely token, the lowest id among equals
    5. else temperature, top-k, top-p, min-p (`engine.sampling.choose`), then the token under the noise

    On a CPU `engine.sampling.native` does the same in one call, if it can; this is what it is measured by.

    A beam search's rows are log-probabilities from the start; it gets the best of what 2 makes of them.
    """

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos = frozenset(eos_token_ids)
        self._masks = GrammarMasks(self._eos)

    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, list[TokenLogprobs | None]]:
        """One token per row, int64 [R] on the logits' device, and log-probabilities where asked for.

        logits: float32 [R, V], overwritten; row r belongs to rows[r]. A row that has no valid choice gets
        `INVALID`, or `GRAMMAR_FAILED`, and no log-probabilities; the other rows are as if it were not there.
        """
        own = OwnLogprobs(logits, rows)
        searching = [index for index, row in enumerate(rows) if is_searching(row)]
        if searching:
            logits[searching] = torch.log_softmax(logits[searching].float(), dim=-1)
        for index, row in enumerate(rows):
            if is_adjusted(row):
                adjust(logits[index], row, self._eos)
        failed = self._masks.apply(logits, rows)
        best, tokens = logits.max(-1)  # NaN and infinity win the maximum
        valid = torch.isfinite(best)
        drawing = [i for i, row in enumerate(rows) if not (row.request.sampling.is_greedy or is_searching(row))]
        if drawing:
            drawing = [index for index, is_valid in zip(drawing, valid[drawing].tolist(), strict=True) if is_valid]
        if drawing:
            tokens[drawing] = _draw_rows(logits[drawing], [rows[index] for index in drawing])
        chosen = torch.where(valid, tokens, INVALID)
        if failed:
            chosen[failed] = GRAMMAR_FAILED
        reports = own.report(logits, chosen)
        if searching:
            found = candidates(logits[searching], [rows[index] for index in searching])
            for index, report, is_valid in zip(searching, found, valid[searching].tolist(), strict=True):
                reports[index] = report if is_valid else None
        return chosen, reports


def sampler_for(eos_token_ids: Collection[int], device: torch.device) -> Sampler | NativeSampler:
    """The native one for logits on a CPU, where the library was built."""
    if device.type == "cpu":
        with contextlib.suppress(native.Unavailable):
            return NativeSampler(eos_token_ids, native.kernels(torch.float32))
    return Sampler(eos_token_ids)


def _draw_rows(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    noise = uniform([row.request.seed for row in rows], [row.num_output for row in rows])
    weights = probabilities(logits, [row.request.sampling for row in rows])
    return draw(weights, torch.from_numpy(noise).to(logits.device))
