"""One choice for all ranks: rank 0 samples, and tells the others the tokens with which the next step may begin."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.logprobs import TokenLogprobs
from engine.parallel.collective import Collective
from engine.sampling.native import NativeSampler
from engine.sampling.row import SamplingRow
from engine.sampling.sampler import Sampler


class SharedSampler:
    """Samples as rank 0's sampler does, which alone knows the requests."""

    def __init__(self, sampler: Sampler | NativeSampler, ranks: Collective) -> None:
        self._sampler, self._ranks = sampler, ranks

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[torch.Tensor, list[TokenLogprobs | None]]:
        """As `Sampler.sample`; other ranks have no `rows`, and are told no log-probabilities."""
        if self._ranks.shard.rank == 0:
            tokens, reports = self._sampler.sample(logits, rows)
        else:
            tokens, reports = torch.empty(len(logits), dtype=torch.int64, device=logits.device), []
        return self._ranks.from_first(tokens), reports


def shared(sampler: Sampler | NativeSampler, ranks: Collective) -> Sampler | NativeSampler | SharedSampler:
    """The same sampler where there is one rank."""
    return sampler if ranks.shard.size == 1 else SharedSampler(sampler, ranks)
