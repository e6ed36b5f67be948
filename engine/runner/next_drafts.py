"""Drafts that are computed behind a step, before the host knows which tokens it sampled.

    the step's tokens     t   d1  d2  d3      at positions p .. p + 3
    sampled after them    x0  x1  x2  x3      x0 is d1, and x1 is not d2: one draft token was right
    the drafter's         x0  x1  x2  x3      at positions p + 1 .. p + 4
                              └─▶ the next draft; later tokens overwrite the KV of x2 and x3

So the host knows all positions and pages when it plans the step. Token ids, and how many are right, stay on the
device. The step after it verifies the drafts there; the host reads them with that step's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.attention.batch import AttentionBatch
from engine.graphs.chain_graphs import Chain
from engine.values.request import Request

if TYPE_CHECKING:
    from engine.runner.token_reader import TokensUnderway


class DraftsUnderway:
    """The draft tokens of some requests: the host knows how many there are."""

    def __init__(self, rows: Mapping[str, int], width: int) -> None:
        """rows: by request id, the request's row; width: draft tokens of each row."""
        self.rows, self.width = rows, width
        self.tokens: torch.Tensor | None = None
        """int64 [R * width]: row by row; set once they are launched."""
        self._on_host: TokensUnderway | None = None
        self._error: Exception | None = None

    def launched(self, tokens: torch.Tensor, on_host: TokensUnderway) -> None:
        """Note the tokens on the device, and their copy to the host."""
        self.tokens, self._on_host = tokens, on_host

    def failed(self, error: Exception) -> None:
        """Note that they could not be launched."""
        self._error = error

    def check(self) -> None:
        """Raise the error with which they could not be launched, once the step before them has been."""
        if self._error is not None:
            raise self._error

    def places(self, request_id: str, count: int) -> range:
        """Return where the first `count` tokens of a request are."""
        first = self.rows[request_id] * self.width
        return range(first, first + count)

    def read(self, request_id: str, count: int) -> Sequence[int]:
        """Wait for the tokens and return the first `count` of a request."""
        assert self._on_host is not None
        places = self.places(request_id, count)
        return self._on_host.wait()[places.start : places.stop]


@dataclass(frozen=True, slots=True)
class NextDrafts:
    """The drafts to compute behind a step: a part of it, whose tensors are sent to the device with the others."""

    underway: DraftsUnderway
    batch: AttentionBatch
    """The tokens that the step samples for the rows, as the drafter computes them."""
    sources: torch.Tensor
    """int64 [N]: for each of these, the row of the step that samples it."""
    places: torch.Tensor
    """int64 [N]: for each, the index of the token before it among the step's."""
    counts: Sequence[tuple[Request, int]]
    """How many of the tokens are each request's, in their order."""
    chain: Chain
    compute: Callable[[NextDrafts, torch.Tensor, torch.Tensor], None]
    """Launches them: `launch`."""

    def launch(self, ids: torch.Tensor, sampled: torch.Tensor) -> None:
        """Launch them in the step's thread, on the device's stream behind the step. Raises nothing.

        ids: int64, the step's tokens; sampled: int64, the tokens of its rows.
        """
        try:
            self.compute(self, ids, sampled)
        except Exception as error:  # The drafter raises it when it is asked next, so that no request fails.
            self.underway.failed(error)
