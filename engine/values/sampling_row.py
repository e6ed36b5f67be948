"""A row of logits: the request whose next token is sampled from it, and the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.values.request import Request


class SamplingRow(NamedTuple):
    """The token to choose follows `request.tokens[:num_known]` and `tail`.

    While a step runs, the scheduler already works on the next one and changes the request. So the sampler reads
    only the leading tokens counted here, which never change, and a tail that only the device knows.
    """

    request: Request
    num_known: int
    """Number of leading tokens of the request that are certain."""
    tail: Sequence[int] = ()
    """Tokens after them: the one that the previous step sampled, or draft tokens that are being verified."""

    @property
    def num_output(self) -> int:
        """Number of tokens generated before the one to choose: its position in the sampling noise."""
        return self.num_known + len(self.tail) - len(self.request.prompt_ids)

    @property
    def num_known_output(self) -> int:
        """Number of generated tokens that are certain."""
        return self.num_known - len(self.request.prompt_ids)

    def history(self) -> list[int]:
        """Return all tokens before the one to choose."""
        return [*self.request.tokens[: self.num_known], *self.tail]

    def output(self, start: int = 0) -> list[int]:
        """Return the generated tokens from index `start` on, which is at most `num_known_output`."""
        return [*self.request.tokens[self.request.num_prompt + start : self.num_known], *self.tail]

    @classmethod
    def of(cls, request: Request) -> SamplingRow:
        """Return the row of a request at rest, whose tokens are all known."""
        return cls(request, request.num_tokens)
