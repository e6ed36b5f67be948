"""A row of logits: whose next token it gives, and after which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.request import Request


class SamplingRow(NamedTuple):
    """The token to choose follows `request.tokens[:num_known]` and `tail`.

    While a step runs, the scheduler already works on the next one and changes the request. So what the sampler may
    look at of it, besides what never changes, is said here: leading tokens, and a tail that only the device knows.
    """

    request: Request
    num_known: int
    """Leading tokens of the request that are certain."""
    tail: Sequence[int] = ()
    """Tokens after them: the one that the step before sampled, or guesses that are being verified."""

    @property
    def num_output(self) -> int:
        """Tokens generated before the one to choose: its position in the sampling noise."""
        return self.num_known + len(self.tail) - len(self.request.prompt_ids)

    @property
    def num_known_output(self) -> int:
        """Generated tokens that are certain."""
        return self.num_known - len(self.request.prompt_ids)

    def history(self) -> list[int]:
        """All tokens before the one to choose."""
        return [*self.request.tokens[: self.num_known], *self.tail]

    def output(self, start: int = 0) -> list[int]:
        """Those of them that were generated, from the one numbered `start` on; it lies among the known ones."""
        return [*self.request.tokens[self.request.num_prompt + start : self.num_known], *self.tail]

    @classmethod
    def of(cls, request: Request) -> SamplingRow:
        """The row of a request at rest: all its tokens are known."""
        return cls(request, request.num_tokens)
