"""Divides the requests that decode over the steps in flight of a pipeline, its micro-batches.

    7 requests, 2 stages, 2 micro-batches

    stage 0   a b c d │ e f g   │ a b c d │ e f g   │ ...
    stage 1           │ a b c d │ e f g   │ a b c d │ ...

A request is in one step at a time, because its next token depends on the last one. If one step had all requests,
the other stages would wait for it. So with m micro-batches a step has at most 1/m of them, rounded up: those whose
last turn is longest ago, so that none waits forever.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import attrgetter

from engine.scheduling.waiting_queue import precedence
from engine.values.request import PENDING, Request

_last_turn = attrgetter("last_turn")
_PIECES, _LEAST_PIECE = 4, 256
"""The prompt tokens to compute are divided into so many pieces for each micro-batch. No piece has fewer tokens
than the second number, because a smaller step takes nearly as long on a GPU."""


class MicroBatches:
    """Says which requests may decode in a step. Without a pipeline all may, in every step."""

    def __init__(self, num: int) -> None:
        """At most `num` steps are in flight; 1 without a pipeline."""
        self._num = num
        self._turns = itertools.count(1)
        self._takes_all = False

    def begin_step(self, *, is_drained: bool) -> None:
        """Begin to plan a step. `is_drained`: those in flight had to end before, because a request lacks pages.

        Then it has all requests, so that the first in order gets the pages of the last, as without a
        pipeline.
        """
        self._takes_all = is_drained

    def prompt_tokens(self, room: int, num_pending: int) -> int:
        """Return how many of `num_pending` prompt tokens a step with room for `room` may have.

        If one step had all of them, only one stage would compute at a time. The last stage waits for the first
        piece, so pieces are small.
        """
        if self._num == 1:
            return room
        return min(room, max(_LEAST_PIECE, -(-num_pending // (_PIECES * self._num))))

    def among(self, decodes: list[Request]) -> ReadyRequests:
        """Return those of the requests that decode whose last token is known. O(decodes)."""
        if self._num == 1:
            return ReadyRequests(decodes, None, 0, self._turns)
        ready = [request for request in decodes if not _is_in_flight(request)]
        num_rows = sum([request.width for request in decodes])
        num_elsewhere = num_rows - sum([request.width for request in ready])
        most = num_rows if self._takes_all else -(-num_rows // self._num)
        ready.sort(key=_last_turn)
        return ReadyRequests(ready, most, min(num_elsewhere, most), self._turns)


class ReadyRequests:
    """The requests that can decode in a step, and how many of them may."""

    def __init__(
        self, requests: list[Request], most: int | None, num_elsewhere: int, turns: Iterator[int]
    ) -> None:
        """`most` rows may decode; None: all. `turns` numbers them."""
        self.requests = requests
        """In a pipeline, those whose last turn is longest ago come first."""
        self.num_elsewhere = num_elsewhere
        """Rows that decode in another step in flight, whose time this one adds to."""
        self._most, self._turns = most, turns

    def take(self, chosen: Sequence[Request]) -> Sequence[Request]:
        """Return those of `chosen` that decode in this step, in order of precedence: as many as have room, and at
        least one, as a beam search may be wider. The others come first in the next step.
        """
        if self._most is None:
            return chosen
        taken: list[Request] = []
        num_rows = 0
        for request in sorted(chosen, key=_last_turn):
            num_rows += request.width
            if taken and num_rows > self._most:
                break
            request.last_turn = next(self._turns)
            taken.append(request)
        return sorted(taken, key=precedence)


def _is_in_flight(request: Request) -> bool:
    """Whether a step in flight samples its next token, or those of its beams, which all decode in one step."""
    return (request.beams[0] if request.beams else request).tokens[-1] == PENDING
