"""A table with a row for each token; every rank holds a part of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.parallel.collective import Collective


def embed(table: torch.Tensor, token_ids: torch.Tensor, ranks: Collective) -> torch.Tensor:
    """Return the rows of int64 [N] tokens, [N, H]. `table` holds this rank's rows, [own, H]."""
    if ranks.shard.size == 1:
        return F.embedding(token_ids, table)
    here = token_ids - ranks.shard.rank * len(table)
    is_elsewhere = (here < 0) | (here >= len(table))
    found = F.embedding(here.masked_fill(is_elsewhere, 0), table)
    return ranks.sum(found.masked_fill_(is_elsewhere[:, None], 0))
