"""Does guessing pay? What guesses cost, measured on steps, and how often each request's are right.

    price   =  extra time of a step per guess in it  /  time of a plain step per request in it
    chance  =  share of a request's guesses that were right, of those whose predecessors were

A right guess saves its request one token of a plain step. So the i-th guess pays while chance^i > price; where not
even the first does, the request goes on without for a while, and then gets another try.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

_NUM_MEASURED = 9
"""Steps that a median is taken over: one that something else held up does not move it."""
_PLAIN_EVERY = 64
"""One in so many steps guesses nothing, so that there is something to compare with."""
_MEMORY = 0.9
"""Weight of the past in a request's chance, per step."""
_RIGHT, _WRONG = 3.0, 1.0
"""What counts as seen of a request of which nothing was seen: three in four are right."""
_LEAST_WRONG = 0.01
"""However often a request's guesses were right, nothing is certain: a chance of 1 has no powers to compare."""
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256
"""Tokens that a request generates without guesses before its next try. Doubles until a try succeeds."""
_PATIENCE = 8
"""Steps in a row without any guess after which nobody is asked for a while."""


class DraftCost:
    """What a guess costs, by the number of requests in the batch (in powers of two)."""

    def __init__(self) -> None:
        self._costs: dict[int, _BatchCosts] = {}

    def is_due(self, num_requests: int) -> bool:
        """Whether the next step should guess nothing, to be compared with. Call it once per step."""
        costs = self._of(num_requests)
        costs.num_asked += 1
        return not costs.plain or costs.num_asked % _PLAIN_EVERY == 0

    def observe(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        """Learn from a step of decodes alone that took `seconds`."""
        costs = self._of(num_requests)
        if not num_drafts:
            costs.plain.append(seconds / num_requests)
        elif costs.plain:
            plain = statistics.median(costs.plain) * num_requests
            costs.drafts.append((seconds - plain) / num_drafts)

    def per_draft_token(self, num_requests: int) -> float:
        """The price of one guess, in tokens of a plain step; 0 until it was measured."""
        costs = self._of(num_requests)
        if not costs.plain or not costs.drafts:
            return 0.0
        return max(0.0, statistics.median(costs.drafts)) / max(statistics.median(costs.plain), 1e-9)

    def _of(self, num_requests: int) -> _BatchCosts:
        return self._costs.setdefault(num_requests.bit_length(), _BatchCosts())


class _BatchCosts:
    """Measured on batches of about one size, in seconds."""

    def __init__(self) -> None:
        self.plain: deque[float] = deque(maxlen=_NUM_MEASURED)  # per request
        self.drafts: deque[float] = deque(maxlen=_NUM_MEASURED)  # per guess
        self.num_asked = 0


@dataclass(slots=True)
class Payoff:
    """What guessing has brought one request, and when it is tried next."""

    resumes_at: int = 0
    """Tokens at which it is tried again; before them, nobody is asked."""
    _right: float = _RIGHT
    _wrong: float = _WRONG
    _num_silent: int = 0
    _pause: int = _FIRST_PAUSE

    @property
    def chance(self) -> float:
        """How likely a guess is right whose predecessors are. [0, 1)."""
        return self._right / (self._right + self._wrong)

    def num_worthwhile(self, price: float, most: int) -> int:
        """How many guesses pay, 0 to `most`."""
        if price <= 0.0:
            return most
        if price >= self.chance:
            return 0
        return min(most, math.ceil(math.log(price) / math.log(self.chance)) - 1)

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Learn what became of a step's guesses (at least one); those after the first wrong one say nothing."""
        self._num_silent = 0
        self._right = _MEMORY * self._right + num_accepted
        self._wrong = max(_MEMORY * self._wrong, _LEAST_WRONG) + (num_accepted < num_drafts)
        if self.chance > _RIGHT / (_RIGHT + _WRONG):
            self._pause = _FIRST_PAUSE

    def silent(self, num_tokens: int) -> None:
        """There was no guess for a request of `num_tokens` tokens."""
        self._num_silent += 1
        if self._num_silent >= _PATIENCE:
            self.resumes_at, self._num_silent = num_tokens + _FIRST_PAUSE, 0

    def pause(self, num_tokens: int) -> None:
        """Go on without guesses for a while. The next try starts afresh."""
        self.resumes_at = num_tokens + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._right, self._wrong, self._num_silent = _RIGHT, _WRONG, 0
