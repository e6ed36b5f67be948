"""Log-probabilities of sampled tokens by the model's own logits: before penalties, masks and temperature.

Sampling overwrites the logits, so each row's top tokens and its normaliser are kept. A copy
of all logits would be 150 MB for 256 rows of a vocabulary of 150k.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.attention.pinned import on_device, on_host
from engine.sampling.adjust import is_adjusted
from engine.sampling.prompt_logprobs import SLICE_BYTES
from engine.values.logprobs import TokenLogprobs
from engine.values.sampling_row import SamplingRow


class SampledLogprobs:
    """The top tokens and normalisers of one step's rows that report. Made before the logits are changed."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[SamplingRow], slice_bytes: int = SLICE_BYTES) -> None:
        """logits: float32 [R, V]; row r belongs to rows[r].

        No more than `slice_bytes` of them are copied at a time, except rows that will be adjusted.
        """
        self._num_rows = len(rows)
        self._wanting = [at for at, row in enumerate(rows) if row.request.sampling.logprobs is not None]
        self._counts = [rows[at].request.sampling.logprobs or 0 for at in self._wanting]
        if not self._wanting:
            return
        self._index = on_device(np.array(self._wanting), logits.device)
        step = max(1, slice_bytes // (4 * logits.shape[1]))
        num_top = min(max(self._counts), logits.shape[1])
        is_all = len(self._wanting) == len(rows)  # Slices are then views, not copies.
        slices = logits.split(step) if is_all else (logits[part] for part in self._index.split(step))
        parts = [_normalised(part, num_top) for part in slices]
        self._totals, self._values, self._tokens = (torch.cat(part) for part in zip(*parts, strict=True))
        changing = [at for at in self._wanting if is_adjusted(rows[at])]
        self._changing = on_device(np.array(changing, dtype=np.int64), logits.device)
        self._unchanged = logits[self._changing]

    def report(self, logits: torch.Tensor, chosen: torch.Tensor) -> list[TokenLogprobs | None]:
        """Return one report per row; None if none is requested or no token was chosen.

        logits: those passed to the constructor, by now adjusted and masked; chosen: int64 [R], negative for none.
        """
        reports: list[TokenLogprobs | None] = [None] * self._num_rows
        if not self._wanting:
            return reports
        tokens = chosen.clamp(min=0)
        logits_of = logits.gather(1, tokens[:, None])
        logits_of[self._changing] = self._unchanged.gather(1, tokens[self._changing, None])
        own, values = logits_of[self._index] - self._totals, self._values - self._totals
        # Numbers of both types are exact in float64: one copy to the host instead of four.
        parts = chosen[self._index, None], own, self._tokens, values
        found = on_host(torch.cat([part.double() for part in parts], dim=1)).tolist()
        num_top = values.shape[1]
        for at, count, (token, logprob, *best) in zip(self._wanting, self._counts, found, strict=True):
            if token >= 0:
                ids = map(int, best[:num_top])
                top = tuple(zip(ids, best[num_top:], strict=True))[:count]
                reports[at] = TokenLogprobs(int(token), logprob, top)
        return reports


def _normalised(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's normaliser, [R, 1], its `num_top` largest logits, and their tokens."""
    best = logits.topk(num_top, dim=-1)
    return logits.logsumexp(-1, keepdim=True), best.values, best.indices
