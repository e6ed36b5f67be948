"""How fast steps are, and so how many prompt tokens one may compute while running decodes keep their rhythm.

Two straight lines are fitted to measured steps, and say how long the next one takes:

    seconds = decodes(how many) + prompt tokens * pace(how much context they attend to)

The pace rises with the context, as each token attends to all before it: late in a long prompt a step holds fewer
tokens than early in it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

# Tokens below which a prompt makes no progress worth the step's fixed cost, and a step says little of the rate.
_MIN_TOKENS = 16
# A median of so many is not moved by one step that something else held up.
_NUM_PACES = 9
# Of a step; a clock may be coarse.
_MIN_SECONDS = 1e-5
# A step's prefill may take as long, however little time decodes take.
_UNNOTICED_SECONDS = 1e-3
# Steps after which a step without prompts shows again how long decodes alone take.
_DECODES_ONLY_EVERY = 32
# Of those, so many may be planned before news of the first is in; then prompts go on in any case.
_MOST_ASKED = 2


class PrefillBudget:
    """Bounds a step's prefill by its tokens and, beside running decodes, by the time it adds to theirs."""

    def __init__(
        self, max_step_tokens: int, max_step_seconds: float | None = None, max_stretch: float | None = None
    ) -> None:
        """A step takes at most `max_step_seconds`, and for each prompt at most `max_stretch` times as long as the
        decodes alone on top of them. None: no such bound.
        """
        self._max_tokens = max_step_tokens
        self._max_seconds = math.inf if max_step_seconds is None else max_step_seconds
        self._max_stretch = max_stretch
        self._decodes = _RunningFit(spread=1.0)  # seconds of steps that only decode, over how many do
        self._pace = _RunningFit(spread=64.0)  # seconds per prompt token beside decodes, over tokens of context
        self._sizes: deque[int] = deque(maxlen=_NUM_PACES)  # prompt tokens of the steps it was fitted to
        self._since_decodes = 0  # steps
        self._num_asked = 0  # steps without prompts, one after the other, so that it is 0 again
        # Seconds per token of the last whole steps, what they decode included. Not of the first: it is slow.
        self._paces: deque[float] = deque(maxlen=_NUM_PACES)
        self._is_first = True
        self._least_rate = 0.0  # of steps too small to measure by

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float, context: float = 0.0) -> None:
        """Learn from a finished step, whose prompt tokens attend to `context` tokens on average."""
        self._since_decodes += 1
        if num_prefill_tokens == 0:
            if num_decodes:
                self._decodes.add(num_decodes, seconds)
                self._since_decodes = 0
            return
        if num_decodes and self._decodes.is_known:
            cost = max(0.0, seconds - self._decodes.at(num_decodes))
            self._pace.add(context, cost / num_prefill_tokens)
            self._sizes.append(num_prefill_tokens)
        if num_prefill_tokens < _MIN_TOKENS:
            self._least_rate = max(self._least_rate, num_prefill_tokens / max(seconds, _MIN_SECONDS))
        elif self._is_first:
            self._is_first = False
        else:
            self._paces.append(seconds / num_prefill_tokens)

    def seconds(self, num_decodes: int, num_prefill_tokens: int) -> float:
        """How long a step of so many tokens will probably take, contexts apart; 0 until that was measured."""
        decodes = self._decodes.at(num_decodes) if num_decodes and self._decodes.is_known else 0.0
        return max(decodes, num_prefill_tokens / self.prefill_rate if self.prefill_rate else 0.0)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second of steps that prefill, decodes beside them and all; 0 until there was one.

        This is what a queue of prompts drains at. Until a step had some size, the best of the small ones.
        """
        if not self._paces:
            return self._least_rate
        return 1.0 / max(statistics.median(self._paces), _MIN_SECONDS / self._max_tokens)

    @property
    def decode_seconds(self) -> float:
        """Seconds of a step without prefill; 0 until there was one."""
        return self._decodes.mean

    def room(self, num_decodes: int, num_prompts: int) -> Room:
        """What `num_prompts` prompts may take of the next step beside `num_decodes` decoding requests."""
        tokens = max(0, self._max_tokens - num_decodes)
        if num_decodes == 0 or num_prompts == 0 or (self._max_seconds == math.inf and self._max_stretch is None):
            return Room(tokens)
        is_news_due = not self._decodes.is_known or self._since_decodes >= _DECODES_ONLY_EVERY
        if is_news_due and self._num_asked < _MOST_ASKED:
            self._num_asked += 1
            return Room(0)
        self._num_asked = 0
        decodes = self._decodes.at(num_decodes)
        seconds = self._max_seconds - decodes
        if self._max_stretch is not None:
            seconds = min(seconds, max(self._max_stretch * decodes * num_prompts, _UNNOTICED_SECONDS))
        # A pace known from small steps says little of large ones, and at first nothing is known of it; but whole
        # steps of prompts alone may have shown what this time is enough for.
        reach = max(4 * _MIN_TOKENS, 2 * max(self._sizes, default=0), int(seconds * self.prefill_rate))
        return Room(min(tokens, reach), seconds, self._pace.start, self._pace.slope)


@dataclass(slots=True)
class Room:
    """What is left of a step for prompts."""

    tokens: int
    seconds: float = math.inf
    pace: float = 0.0
    """Seconds per prompt token without context."""
    slope: float = 0.0
    """Seconds more per token of context."""
    taken: int = 0
    """Tokens."""

    @property
    def is_full(self) -> bool:
        """Whether not a single token fits any more."""
        return self.most(0, 1) <= 0

    def most(self, start: int, wanted: int, share: float = 1.0) -> int:
        """How many of the `wanted` tokens from position `start` on fit into this share of it.

        The step's first few fit even if they take too long, so that a prompt always gets on.
        """
        affordable = max(_MIN_TOKENS - self.taken, self._affordable(start, self.seconds * share))
        return min(wanted, math.ceil(self.tokens * share), affordable)

    def take(self, start: int, num_tokens: int) -> None:
        """Give so many tokens from position `start` on to a prompt."""
        self.tokens -= num_tokens
        self.taken += num_tokens
        self.seconds -= num_tokens * (self.pace + self.slope * (start + num_tokens / 2))

    def _affordable(self, start: int, seconds: float) -> int:
        """Most n with n * (pace + slope * (start + n / 2)) <= seconds."""
        first = self.pace + self.slope * start
        if seconds <= 0:
            return 0
        if seconds == math.inf or first <= 0:
            return self.tokens
        return int(min(2 * seconds / (first + math.sqrt(first**2 + 2 * self.slope * seconds)), self.tokens))


class _RunningFit:
    """A straight line through recent points, the last ten above all; it never falls."""

    _FORGET = 0.9
    _HELD_UP = 2.0  # A point so many times as high as the line was held up by something else.

    def __init__(self, spread: float) -> None:
        """`spread`: points whose x differ by less say nothing of the slope."""
        self._least_variance = spread**2
        self._weight = self._variance = self._covariance = self._mean_x = 0.0
        self.mean = 0.0
        """Of the points' y."""

    @property
    def is_known(self) -> bool:
        """Whether there is any point."""
        return self._weight > 0

    @property
    def slope(self) -> float:
        """Of y over x; less than that of the line from 0, so that y is positive everywhere."""
        slope = max(0.0, self._covariance / (self._variance + self._least_variance))
        return min(slope, 0.9 * self.mean / self._mean_x) if self._mean_x > 0 else 0.0

    @property
    def start(self) -> float:
        """The line's y at x = 0."""
        return self.mean - self.slope * self._mean_x

    def at(self, x: float) -> float:
        """The line's y."""
        return self.start + self.slope * x

    def add(self, x: float, y: float) -> None:
        """A point more."""
        if self._weight > 3 and self.mean > 0:
            y = min(y, self._HELD_UP * self.at(x))
        self._weight = self._weight * self._FORGET + 1
        part = 1 / self._weight
        dx, dy = x - self._mean_x, y - self.mean
        self._mean_x += part * dx
        self.mean += part * dy
        self._variance = (1 - part) * (self._variance + part * dx * dx)
        self._covariance = (1 - part) * (self._covariance + part * dx * dy)
