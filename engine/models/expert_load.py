"""Counts the tokens of each expert in each layer, on the device of the first rank, where all tokens are routed.

layer 0   experts of N tokens ─┐
layer 1   experts of N tokens ─┼─ at the end of a step, without padding ─▶ counts [layers, experts]
...                            ┘
rank      [   0   |   1   |   2   |   3   ]   experts, in equal parts: a layer takes as long as its busiest rank
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

_FEWEST_CHOICES = 1024
"""Choices of experts from which the imbalance is computed: of few, some experts get more by chance."""


class ExpertLoad:
    """The load of one engine's experts. One thread counts, and another may read."""

    def __init__(self, num_layers: int, num_experts: int, num_ranks: int, device: torch.device) -> None:
        """`num_layers`: layers with experts, which are shared by `num_ranks` ranks."""
        self.counts = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        """Tokens of each expert so far."""
        self.padding_from = torch.iinfo(torch.int64).max
        """The first slot for KV of padding: tokens that write there or after it are not counted."""
        self._chosen: list[torch.Tensor] = [self.counts] * num_layers
        each = torch.eye(num_ranks, dtype=torch.float64).repeat_interleave(num_experts // num_ranks, 0)
        self._shares = each.repeat(num_layers, 1, 1)
        """[layers, experts, ranks]: the share of an expert's tokens that each rank computes."""
        self._seen = torch.zeros(num_layers, num_experts, dtype=torch.int64)
        self._imbalance: float | None = None

    def of_layer(self, number: int) -> Callable[[torch.Tensor], None]:
        """Return the function to which a layer passes each token's experts, int64 [N, k]."""
        return partial(self._chosen.__setitem__, number)

    def share(self, number: int, holders: Sequence[Sequence[int]]) -> None:
        """Divide the tokens of each expert of a layer equally among the ranks that hold it."""
        ranks = range(self._shares.shape[2])
        each = [[(rank in those) / len(those) for rank in ranks] for those in holders]
        self._shares[number] = torch.tensor(each, dtype=torch.float64)

    def add(self, slots: torch.Tensor) -> None:
        """Count the tokens of a step, when all layers have passed their experts. Does not wait for the device.

        slots: int64 [N], the slots to which their KV is written
        """
        chosen = torch.stack(self._chosen)
        num_layers, _, per_token = chosen.shape
        is_counted = (slots < self.padding_from).long().repeat_interleave(per_token)
        self.counts.scatter_add_(1, chosen.flatten(1), is_counted.expand(num_layers, -1))
        self._chosen[:] = [self.counts] * num_layers  # The memory of the others is free again.

    def read(self) -> torch.Tensor:
        """Return a copy of `counts` on the host, after the steps launched so far."""
        return self.counts.to("cpu", copy=True)

    def imbalance(self) -> float | None:
        """Return the tokens of the busiest rank over the mean of the ranks, averaged over layers; 1 is even.

        It is a figure of the tokens since an earlier call, or of those before; None while there were few.
        """
        counts = self.read()
        new = counts - self._seen
        if new[0].sum() >= _FEWEST_CHOICES:
            self._seen = counts
            of_ranks = (new.double()[:, None] @ self._shares)[:, 0]
            self._imbalance = float((of_ranks.amax(1) / of_ranks.mean(1)).mean())
        return self._imbalance
