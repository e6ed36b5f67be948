"""Decides how much drafting pays: by the cost of draft tokens, measured on steps, and the acceptance rates.

    cost    =  extra time of a step per draft token in it  /  time of a plain step per request in it
    chance  =  share of a request's draft tokens that were accepted, of those whose predecessors were accepted

An accepted draft token saves its request one token of a plain step. So the i-th draft token pays while
chance^i > cost; if not even the first does, the request continues without drafts for a while and then tries again.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

_NUM_MEASURED = 9
"""Number of steps whose median is taken, so that a single delayed step does not move it."""
_LEAST_MEASURED = 3
"""Number of steps with draft tokens before their cost counts."""
_PLAIN_EVERY = 64
"""One in so many steps has no draft tokens, for comparison."""
_DECAY = 0.9
"""Weight of the past in a request's chance, per step."""
_ACCEPTED, _REJECTED = 3.0, 1.0
"""Counts that a new request starts with: three of four draft tokens are accepted."""
_LEAST_REJECTED = 0.01
"""Lower bound of the rejected count: a chance of 1 has no powers to compare."""
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256
"""Tokens that a request generates without drafts before it tries again. Doubles until a try succeeds."""
_MAX_SILENT = 8
"""Number of steps in a row without any draft token after which the drafter is not asked for a while."""


class DraftCost:
    """The cost of a draft token, by the number of requests in the batch (in powers of two)."""

    def __init__(self) -> None:
        self._costs: dict[int, _BatchCosts] = {}

    def is_due(self, num_requests: int) -> bool:
        """Return whether the next step should have no drafts, for comparison. Call exactly once per step."""
        costs = self._of(num_requests)
        costs.num_asked += 1
        return not costs.plain or costs.num_asked % _PLAIN_EVERY == 0

    def observe(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        """Learn from a step with only decodes, which took `seconds`."""
        costs = self._of(num_requests)
        if not num_drafts:
            costs.plain.append(seconds / num_requests)
        elif costs.plain:
            plain = statistics.median(costs.plain) * num_requests
            costs.drafts.append((seconds - plain) / num_drafts)

    def per_draft_token(self, num_requests: int) -> float:
        """Return the cost of one draft token, in tokens of a plain step; 0 until it was measured. A few steps are
        measured: a single delayed one could otherwise end drafting, and with it all measurements.
        """
        costs = self._of(num_requests)
        if not costs.plain or len(costs.drafts) < _LEAST_MEASURED:
            return 0.0
        return max(0.0, statistics.median(costs.drafts)) / max(statistics.median(costs.plain), 1e-9)

    def _of(self, num_requests: int) -> _BatchCosts:
        return self._costs.setdefault(num_requests.bit_length(), _BatchCosts())


class _BatchCosts:
    """Times measured on batches of about one size, in seconds."""

    def __init__(self) -> None:
        self.plain: deque[float] = deque(maxlen=_NUM_MEASURED)  # per request
        self.drafts: deque[float] = deque(maxlen=_NUM_MEASURED)  # per draft token
        self.num_asked = 0


@dataclass(slots=True)
class Payoff:
    """The success of drafting for one request, and when it is tried next."""

    resumes_at: int = 0
    """Number of tokens from which on the request gets drafts again."""
    _accepted: float = _ACCEPTED
    _rejected: float = _REJECTED
    _num_silent: int = 0
    _pause: int = _FIRST_PAUSE

    @property
    def chance(self) -> float:
        """Probability in [0, 1) that a draft token is accepted if its predecessors are."""
        return self._accepted / (self._accepted + self._rejected)

    def num_worthwhile(self, cost: float, most: int) -> int:
        """Return how many draft tokens pay, 0 to `most`."""
        if cost <= 0.0:
            return most
        if cost >= self.chance:
            return 0
        return min(most, math.ceil(math.log(cost) / math.log(self.chance)) - 1)

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Learn how many of a step's draft tokens (at least one) were accepted; counts one rejection at most."""
        self._num_silent = 0
        self._accepted = _DECAY * self._accepted + num_accepted
        self._rejected = max(_DECAY * self._rejected, _LEAST_REJECTED) + (num_accepted < num_drafts)
        if self.chance > _ACCEPTED / (_ACCEPTED + _REJECTED):
            self._pause = _FIRST_PAUSE

    def silent(self, num_tokens: int) -> None:
        """Note that the drafter proposed nothing for a request of `num_tokens` tokens."""
        self._num_silent += 1
        if self._num_silent >= _MAX_SILENT:
            self.resumes_at, self._num_silent = num_tokens + _FIRST_PAUSE, 0

    def pause(self, num_tokens: int) -> None:
        """Continue without drafts for a while. The next try starts from the initial counts."""
        self.resumes_at = num_tokens + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._accepted, self._rejected, self._num_silent = _ACCEPTED, _REJECTED, 0
