"""How long steps take, and how many prompt tokens one may compute while decodes keep their inter-token latency.

Two straight lines are fitted to measured steps and predict how long the next one takes:

    seconds = decodes(how many) + prompt tokens * pace(how much context they attend to)

The pace rises with the context, as each token attends to all before it: late in a long prompt a step holds fewer
tokens than early in it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

# With fewer tokens, a prompt's progress is not worth the step's fixed cost, and a step says little about the rate.
_MIN_TOKENS = 16
# The median of this many paces is not moved by one step that was delayed by something else.
_NUM_PACES = 9
# Least duration of a step, as a clock may be coarse.
_MIN_SECONDS = 1e-5
# A step's prefill may take this long, however little time decodes take.
_UNNOTICED_SECONDS = 1e-3
# After this many steps, a step without prompts measures again how long decodes alone take.
_DECODES_ONLY_EVERY = 32
# Most such steps in a row: the result of the first comes later, and then prompts go on in any case.
_MAX_SAMPLES = 2


class PrefillBudget:
    """Bounds a step's prefill by its tokens and, beside running decodes, by the time that it adds to theirs."""

    def __init__(
        self, max_step_tokens: int, max_step_seconds: float | None = None, max_stretch: float | None = None
    ) -> None:
        """A step takes at most `max_step_seconds`. Each prompt adds at most `max_stretch` times what the decodes
        take alone. None: no such bound.
        """
        self._max_tokens = max_step_tokens
        self._max_seconds = math.inf if max_step_seconds is None else max_step_seconds
        self._max_stretch = max_stretch
        self._decodes = _RunningFit(spread=1.0)  # seconds of steps that only decode, over the number of decodes
        self._pace = _RunningFit(spread=64.0)  # seconds per prompt token beside decodes, over tokens of context
        self._sizes: deque[int] = deque(maxlen=_NUM_PACES)  # prompt tokens of the steps that `_pace` was fitted to
        self._since_decodes = 0  # steps
        self._num_samples = 0  # consecutive steps without prompts that measure decodes
        # Seconds per prompt token of the last steps, decodes included, without the first step, which is slow.
        self._paces: deque[float] = deque(maxlen=_NUM_PACES)
        self._is_first = True
        self.prefill_rate = 0.0
        """Prompt tokens per second of steps that prefill, decodes included; 0 until there was one.

        A queue of prompts drains at this rate. Until a step was large enough, it is the best of the small ones.
        """

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
        if num_prefill_tokens >= _MIN_TOKENS and not self._is_first:
            self._paces.append(seconds / num_prefill_tokens)
            self.prefill_rate = 1.0 / max(statistics.median(self._paces), _MIN_SECONDS / self._max_tokens)
        elif num_prefill_tokens >= _MIN_TOKENS:
            self._is_first = False
        elif not self._paces:
            self.prefill_rate = max(self.prefill_rate, num_prefill_tokens / max(seconds, _MIN_SECONDS))

    def seconds(self, num_decodes: int, num_prefill_tokens: int) -> float:
        """Predict how long a step of this many tokens takes, whatever its context; 0 until one was measured."""
        decodes = self._decodes.at(num_decodes) if num_decodes and self._decodes.is_known else 0.0
        return max(decodes, num_prefill_tokens / self.prefill_rate if self.prefill_rate else 0.0)

    @property
    def decode_seconds(self) -> float:
        """Seconds of a step without prefill; 0 until there was one."""
        return self._decodes.mean

    def room(self, num_decodes: int, num_prompts: int) -> Room:
        """Return what `num_prompts` prompts may take of the next step beside `num_decodes` decoding requests."""
        tokens = max(0, self._max_tokens - num_decodes)
        if num_decodes == 0 or num_prompts == 0 or (self._max_seconds == math.inf and self._max_stretch is None):
            return Room(tokens)
        is_sample_due = not self._decodes.is_known or self._since_decodes >= _DECODES_ONLY_EVERY
        if is_sample_due and self._num_samples < _MAX_SAMPLES:
            self._num_samples += 1
            return Room(0)
        self._num_samples = 0
        decodes = self._decodes.at(num_decodes)
        seconds = self._max_seconds - decodes
        if self._max_stretch is not None:
            seconds = min(seconds, max(self._max_stretch * decodes * num_prompts, _UNNOTICED_SECONDS))
        # A pace measured in small steps says little about large ones, and at first there is none; but steps of
        # prompts alone may have shown how many tokens fit in this time.
        reach = max(4 * _MIN_TOKENS, 2 * max(self._sizes, default=0), int(seconds * self.prefill_rate))
        return Room(min(tokens, reach), seconds, self._pace.start, self._pace.slope)


@dataclass(slots=True)
class Room:
    """The room that is left in a step for prompts."""

    tokens: int
    seconds: float = math.inf
    pace: float = 0.0
    """Seconds per prompt token without context."""
    slope: float = 0.0
    """Additional seconds per prompt token for each token of context."""
    taken: int = 0
    """Tokens given to prompts so far."""

    @property
    def is_full(self) -> bool:
        """Whether not even one more token fits."""
        return self.most(0, 1) <= 0

    def most(self, start: int, wanted: int, share: float = 1.0) -> int:
        """Return how many of the `wanted` tokens from position `start` on fit into this share of the room.

        The step's first few fit even if they take too long, so that a prompt always makes progress.
        """
        if self.seconds == math.inf:  # as where nothing decodes
            return min(wanted, math.ceil(self.tokens * share))
        affordable = max(_MIN_TOKENS - self.taken, self._affordable(start, self.seconds * share))
        return min(wanted, math.ceil(self.tokens * share), affordable)

    def take(self, start: int, num_tokens: int) -> None:
        """Give `num_tokens` tokens from position `start` on to a prompt."""
        self.tokens -= num_tokens
        self.taken += num_tokens
        self.seconds -= num_tokens * (self.pace + self.slope * (start + num_tokens / 2))

    def _affordable(self, start: int, seconds: float) -> int:
        """Return the largest n with n * (pace + slope * (start + n / 2)) <= seconds."""
        first = self.pace + self.slope * start
        if seconds <= 0:
            return 0
        if first <= 0:
            return self.tokens
        return int(min(2 * seconds / (first + math.sqrt(first**2 + 2 * self.slope * seconds)), self.tokens))


class _RunningFit:
    """Linear regression over recent points, mainly the last ten, whose slope is never negative."""

    _DECAY = 0.9
    _MAX_RATIO = 2.0  # A point higher than this multiple of the line was delayed by something else.

    def __init__(self, spread: float) -> None:
        """`spread`: points whose x differ by less say nothing about the slope."""
        self._least_variance = spread**2
        self._weight = self._variance = self._covariance = self._mean_x = 0.0
        self.mean = 0.0
        """Mean of the points' y."""

    @property
    def is_known(self) -> bool:
        """Whether there are any points."""
        return self._weight > 0

    @property
    def slope(self) -> float:
        """Slope of y over x, bounded so that the line is positive at every x >= 0."""
        slope = max(0.0, self._covariance / (self._variance + self._least_variance))
        return min(slope, 0.9 * self.mean / self._mean_x) if self._mean_x > 0 else 0.0

    @property
    def start(self) -> float:
        """The line's y at x = 0."""
        return self.mean - self.slope * self._mean_x

    def at(self, x: float) -> float:
        """The line's y at `x`."""
        return self.start + self.slope * x

    def add(self, x: float, y: float) -> None:
        """Add a point."""
        if self._weight > 3 and self.mean > 0:
            y = min(y, self._MAX_RATIO * self.at(x))
        self._weight = self._weight * self._DECAY + 1
        part = 1 / self._weight
        dx, dy = x - self._mean_x, y - self.mean
        self._mean_x += part * dx
        self.mean += part * dy
        self._variance = (1 - part) * (self._variance + part * dx * dx)
        self._covariance = (1 - part) * (self._covariance + part * dx * dy)
