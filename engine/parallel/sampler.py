"""Sampling with several ranks: rank 0 samples and sends the tokens to the others for the next step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.parallel.collective import Collective
from engine.sampling.native import NativeSampler
from engine.sampling.sampler import Sampler
from engine.values.logprobs import TokenLogprobs
from engine.values.sampling_row import SamplingRow


class SharedSampler:
    """Samples on rank 0, the only one that knows the requests, and shares the tokens."""

    def __init__(self, sampler: Sampler | NativeSampler, ranks: Collective) -> None:
        self._sampler, self._ranks = sampler, ranks

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[torch.Tensor, list[TokenLogprobs | None]]:
        """Sample as `Sampler.sample` does. The other ranks have no `rows` and get no log-probabilities."""
        if self._ranks.shard.rank == 0:
            tokens, reports = self._sampler.sample(logits, rows)
        else:
            tokens, reports = torch.empty(len(logits), dtype=torch.int64, device=logits.device), []
        return self._ranks.from_first(tokens), reports


def shared(sampler: Sampler | NativeSampler, ranks: Collective) -> Sampler | NativeSampler | SharedSampler:
    """Return a sampler for all ranks: `sampler` itself if there is only one."""
    return sampler if ranks.shard.size == 1 else SharedSampler(sampler, ranks)
