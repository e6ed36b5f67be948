"""Predicts how long steps take, and limits a step's prompt tokens so that decodes keep their inter-token latency.

Two fits to measured steps predict how long the next one takes:

    seconds = decodes(how many) + fixed + prompt tokens * pace(how much context they attend to)

The pace rises with the context, because each token attends to all before it: late in a long prompt a step holds
fewer tokens than early in it. `fixed` is the cost of having any prompt in a step: little on a CPU, but on a GPU
steps with only decodes are replayed as one graph, and a step with prompts may launch its layers one by one.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

# With fewer tokens, the step's fixed cost exceeds its progress, and the rate cannot be measured well.
_MIN_TOKENS = 16
# One delayed step does not move the median of this many paces.
_NUM_PACES = 9
# Least duration of a step, because a clock may be coarse.
_MIN_SECONDS = 1e-5
# Seconds that a step's prefill may take, however fast decodes are.
_UNNOTICED_SECONDS = 1e-3
# After this many steps, a step without prompts measures again how long decodes take by themselves.
_DECODES_ONLY_EVERY = 32
# Most such steps in a row: the result of the first comes later, and prompts then resume in any case.
_MAX_SAMPLES = 2
# Most debt that prompts pay by waiting: the delay of a step by something else may look like their own cost.
_MOST_DEBT_SECONDS = 0.1
# After this many steps with deferrable decodes, a step without them measures again how long the others take.
_OTHERS_ONLY_EVERY = 8
# A brief step takes at most this many times as long as the shortest recent one.
_BRIEF = 3.0
# The shortest recent step is multiplied by this after each step: it doubles after seven hundred.
_FORGET = 1.001
# The largest part of a fit's mean that its slopes may explain.
_MOST_OF = 0.9

DEFERRABLE_SHARE = 1 / 3
"""Time that all deferrable decodes together, and all deferrable prompts together, may add to a step with other
decodes, as a share of the time that each other prompt may add."""


class PrefillBudget:
    """Bounds a step's prefill by its tokens and, while decodes run, by the time that it adds to theirs."""

    def __init__(
        self, max_step_tokens: int, max_step_seconds: float | None = None, max_stretch: float | None = None
    ) -> None:
        """A step takes at most `max_step_seconds`. Each prompt adds at most `max_stretch` times the time of the
        decodes by themselves. None: no such bound.
        """
        self._max_tokens = max_step_tokens
        self._max_seconds = math.inf if max_step_seconds is None else max_step_seconds
        self._max_stretch = max_stretch
        self._decodes = _RunningFit(1.0)  # seconds of decode-only steps, by the number of decodes
        # Seconds per prompt token in steps with decodes, over tokens of context and 1 / prompt tokens of the step.
        self._pace = _RunningFit(64.0, 1 / 2048)
        self._sizes: deque[int] = deque(maxlen=_NUM_PACES)  # prompt tokens of the steps behind `_pace`
        self._since_decodes = 0  # steps since one without prompts
        self._num_samples = 0  # consecutive steps without prompts that measure decodes
        self._last = Room(0)  # room of the last planned step
        self._debt = 0.0  # seconds that prompts added to steps beyond their share
        # Seconds per prompt token of the last steps, decodes included, without the first step, which is slow.
        self._paces: deque[float] = deque(maxlen=_NUM_PACES)
        self._is_first = True
        self._deferrable = _ExtraDecodes(self._decodes, max_step_tokens, max_stretch)
        self._above_share = _ExtraDecodes(self._decodes, max_step_tokens, max_stretch)
        self._saved = 0.0  # seconds that deferrable prompts may still use
        self._shortest = math.inf  # seconds of a step without prompts
        self.prefill_rate = 0.0
        """Prompt tokens per second of steps that prefill, decodes included; 0 until there was one.

        A queue of prompts drains at this rate. Until a step was large enough, it is the best of the small ones.
        """

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float, context: float = 0.0) -> None:
        """Learn from a finished step, whose prompt tokens attend to `context` tokens on average."""
        self._since_decodes += 1
        if num_prefill_tokens == 0:
            if num_decodes:
                self._decodes.add(seconds, num_decodes)
                self._shortest = min(self._shortest * _FORGET, max(seconds, _MIN_SECONDS))
                self._since_decodes = 0
            return
        if num_decodes and self._decodes.is_known:
            cost = max(0.0, seconds - self._decodes.at(num_decodes))
            self._pace.add(cost / num_prefill_tokens, context, 1 / num_prefill_tokens)
            self._sizes.append(num_prefill_tokens)
        if num_prefill_tokens >= _MIN_TOKENS and not self._is_first:
            self._paces.append(seconds / num_prefill_tokens)
            self.prefill_rate = 1.0 / max(statistics.median(self._paces), _MIN_SECONDS / self._max_tokens)
        elif num_prefill_tokens >= _MIN_TOKENS:
            self._is_first = False
        elif not self._paces:
            self.prefill_rate = max(self.prefill_rate, num_prefill_tokens / max(seconds, _MIN_SECONDS))

    def seconds(self, num_decodes: int, num_prefill_tokens: int) -> float:
        """Predict the seconds of a step with this many tokens and any context; 0 until one was measured."""
        decodes = self._decodes.at(num_decodes) if num_decodes and self._decodes.is_known else 0.0
        return max(decodes, num_prefill_tokens / self.prefill_rate if self.prefill_rate else 0.0)

    @property
    def decode_seconds(self) -> float:
        """Seconds of a step without prefill; 0 until there was one."""
        return self._decodes.mean

    def num_deferrable_decodes(self, num_decodes: int, *, is_brief: bool) -> int:
        """Return how many deferrable requests may decode in a step in which others decode, on average. Without
        others, as many as fit into the longest step, or into a brief one, which delays newcomers less.
        """
        if not num_decodes:
            return self.num_in_brief_step() if is_brief else self._decodes_within(self._max_seconds)
        return self._deferrable.num(num_decodes)

    def num_in_brief_step(self) -> int:
        """Return how many requests may decode in a step that delays newcomers only a little."""
        # Times measured with few decodes do not predict those with many.
        most = 2 * int(self._decodes.center) + 1
        return min(most, self._decodes_within(self._brief_seconds))

    @property
    def _brief_seconds(self) -> float:
        return min(self._max_seconds, _BRIEF * self._shortest)

    @property
    def _fixed(self) -> float:
        """Seconds that any prompt in a step costs."""
        return self._pace.slopes[1]

    def num_above_share(self, num_decodes: int) -> int:
        """Return how many requests of tenants above their shares may decode with `num_decodes` others."""
        return self._above_share.num(num_decodes)

    def _decodes_within(self, seconds: float) -> int:
        """Return how many decodes fit into a step, at least one; all if steps as measured are short enough."""
        fit = self._decodes
        if fit.slopes[0]:
            return max(1, int(min((seconds - fit.start) / fit.slopes[0], self._max_tokens)))
        if fit.mean <= seconds:
            return self._max_tokens
        return max(1, int(fit.center * seconds / fit.mean))  # one size of step gives no slope

    def deferrable_room(
        self, num_decodes: int, num_prompts: int, *, has_others: bool, is_brief: bool = False
    ) -> Room:
        """Return the room that a step without other prompts has for `num_prompts` deferrable ones. Even without
        decodes it is no longer than others' steps, or brief, because it delays newcomers.
        """
        longest = self._brief_seconds if is_brief else self._max_seconds
        if num_decodes == 0 and self.prefill_rate and longest < math.inf:
            return Room(min(self._max_tokens, max(_MIN_TOKENS, int(longest * self.prefill_rate))))
        if not has_others:
            room = self.room(num_decodes, num_prompts)
            if is_brief:
                room.seconds = min(room.seconds, longest)
            return room
        if self._max_stretch is not None:
            # The minimum for a prompt may take longer than it may add: it then gets that in some steps only.
            least = self._fixed + _MIN_TOKENS * self._pace.start
            self._saved = min(self._saved, least) + DEFERRABLE_SHARE * self._max_stretch * self.decode_seconds
            if self._saved < least:
                return Room(0)
            self._saved -= least
        return self.room(num_decodes, DEFERRABLE_SHARE)

    def room(self, num_decodes: int, num_prompts: float) -> Room:
        """Return the room that the next step has for `num_prompts` prompts with `num_decodes` decoding requests.

        If their fixed cost by itself exceeds the time that they may add, many small steps would cost most. Prompts
        then wait for some steps, and then get as much time as the fixed cost in one step: on average they add no
        more than they may.
        """
        tokens = max(0, self._max_tokens - num_decodes)
        if num_decodes == 0 or num_prompts == 0 or (self._max_seconds == math.inf and self._max_stretch is None):
            return Room(tokens)
        is_sample_due = not self._decodes.is_known or self._since_decodes >= _DECODES_ONLY_EVERY
        if is_sample_due and self._num_samples < _MAX_SAMPLES:
            self._num_samples += 1
            return Room(0)
        self._num_samples = 0
        decodes, fixed = self._decodes.at(num_decodes), self._fixed
        if not self._decodes.tells_slope and num_decodes < self._decodes.center:
            decodes *= num_decodes / self._decodes.center
        left = self._max_seconds - decodes - fixed
        seconds, over = left, 0.0
        if self._max_stretch is not None:
            allowed = max(self._max_stretch * decodes * num_prompts, _UNNOTICED_SECONDS)
            self._debt = max(0.0, min(self._debt + self._last.debt, _MOST_DEBT_SECONDS) - allowed)
            if self._debt > 0:
                self._last = Room(0)
                return self._last
            over = max(0.0, fixed - allowed)
            seconds = min(left, max(allowed - fixed, fixed))
        # A pace measured in small steps does not predict large ones, and at first there is none; but steps with
        # only prompts may have shown how many tokens fit in this time.
        reach = max(4 * _MIN_TOKENS, 2 * max(self._sizes, default=0), int(seconds * self.prefill_rate))
        self._last = Room(min(tokens, reach), seconds, self._pace.start, self._pace.slopes[0], over)
        return self._last


@dataclass(slots=True)
class Room:
    """The room that is left in a step for prompts."""

    tokens: int
    seconds: float = math.inf
    pace: float = 0.0
    """Seconds per prompt token without context."""
    slope: float = 0.0
    """Additional seconds per prompt token for each token of context."""
    over: float = 0.0
    """Seconds by which the fixed cost of prompts exceeds the time that they may take."""
    taken: int = 0
    """Tokens given to prompts so far."""
    taken_seconds: float = 0.0
    """Seconds that these tokens take."""

    @property
    def debt(self) -> float:
        """Seconds by which the step is longer than prompts may make it, because of their fixed cost."""
        return self.over + self.taken_seconds if self.taken and self.over else 0.0

    @property
    def is_full(self) -> bool:
        """Whether not even one more token fits."""
        return self.most(0, 1) <= 0

    def most(self, start: int, wanted: int, share: float = 1.0) -> int:
        """Return how many of the `wanted` tokens from position `start` on fit into this share of the room.

        The step's first few fit even if they take too long, so that a prompt always makes progress.
        """
        if self.seconds == math.inf:  # where nothing decodes
            return min(wanted, math.ceil(self.tokens * share))
        affordable = max(_MIN_TOKENS - self.taken, self._affordable(start, self.seconds * share))
        return min(wanted, math.ceil(self.tokens * share), affordable)

    def take(self, start: int, num_tokens: int) -> None:
        """Give `num_tokens` tokens from position `start` on to a prompt."""
        self.tokens -= num_tokens
        seconds = num_tokens * (self.pace + self.slope * (start + num_tokens / 2))
        self.taken, self.taken_seconds = self.taken + num_tokens, self.taken_seconds + seconds
        self.seconds -= seconds

    def _affordable(self, start: int, seconds: float) -> int:
        """Return the largest n with n * (pace + slope * (start + n / 2)) <= seconds."""
        first = self.pace + self.slope * start
        if seconds <= 0:
            return 0
        if first <= 0:
            return self.tokens
        return int(min(2 * seconds / (first + math.sqrt(first**2 + 2 * self.slope * seconds)), self.tokens))


class _ExtraDecodes:
    """Limits how many more requests decode in a step, so that the others are only a little slower."""

    def __init__(self, decodes: _RunningFit, most: int, max_stretch: float | None) -> None:
        """`decodes` fits the measured seconds of steps over their decodes."""
        self._decodes, self._most, self._max_stretch = decodes, most, max_stretch
        self._num, self._since_without = 0, _OTHERS_ONLY_EVERY
        self._unused = 0.0  # seconds that these requests may still use

    def num(self, num_decodes: int) -> int:
        """Return how many may decode with `num_decodes` others in the next step; in some steps none, to measure
        how long the others take.
        """
        if self._max_stretch is None:
            return self._most
        self._since_without += 1
        if self._since_without > _OTHERS_ONLY_EVERY or not self._decodes.is_known:
            self._since_without = 0
            return 0
        fit, share = self._decodes, DEFERRABLE_SHARE * self._max_stretch
        if fit.tells_slope:
            allowed = share * fit.at(num_decodes)
            per_decode = max(fit.slopes[0], allowed / self._most)
        else:  # One size of step gives no slope, only this upper bound.
            per_decode = fit.mean / fit.center
            allowed = share * num_decodes * per_decode
        self._unused = min(self._unused, per_decode) + allowed
        # Times measured with few of them do not predict those with many.
        most = max(0, int(2 * self._decodes.center) + 1 - num_decodes)
        self._num = min(int(self._unused / per_decode), 2 * self._num + 1, most)
        self._unused -= self._num * per_decode
        return self._num


class _RunningFit:
    """Linear regression over recent points, mainly the last ten, whose slopes are never negative."""

    _DECAY = 0.9
    _MAX_RATIO = 2.0  # A point higher than this multiple of the fit was delayed by something else.
    _ROUNDS = 6  # rounds of coordinate descent, which finds the slopes

    def __init__(self, *spreads: float) -> None:
        """`spreads`, one for each x: points whose x differ by less do not determine its slope."""
        size = len(spreads)
        self._ridge = [spread**2 for spread in spreads]
        self._weight = 0.0
        self._means = [0.0] * size
        self._products = [[0.0] * size for _ in range(size)]  # covariances of one x with another
        self._covariances = [0.0] * size  # covariance of each x with y
        self.mean = 0.0
        """Mean of the points' y."""
        self.slopes = [0.0] * size
        """Slope of y over each x, bounded so that y is positive wherever all x >= 0."""

    @property
    def is_known(self) -> bool:
        """Whether there are any points."""
        return self._weight > 0

    @property
    def tells_slope(self) -> bool:
        """Whether the points' first x differ enough to determine their slope, which may be 0."""
        return bool(self.slopes[0]) or self._products[0][0] > (self._means[0] / 4) ** 2

    @property
    def center(self) -> float:
        """Mean of the points' first x."""
        return self._means[0]

    @property
    def start(self) -> float:
        """y where all x are 0."""
        return self.at(*[0.0] * len(self.slopes))

    def at(self, *x: float) -> float:
        """y at `x`."""
        steps = zip(self.slopes, x, self._means, strict=True)
        return self.mean + sum([slope * (one - mean) for slope, one, mean in steps])

    def add(self, y: float, *x: float) -> None:
        """Add a point."""
        if self._weight > 3 and self.mean > 0:
            y = min(y, self._MAX_RATIO * self.at(*x))
        self._weight = self._weight * self._DECAY + 1
        part = 1 / self._weight
        steps, dy = [one - mean for one, mean in zip(x, self._means, strict=True)], y - self.mean
        self.mean += part * dy
        for i, step in enumerate(steps):
            self._means[i] += part * step
            self._covariances[i] = (1 - part) * (self._covariances[i] + part * step * dy)
            for j, other in enumerate(steps):
                self._products[i][j] = (1 - part) * (self._products[i][j] + part * step * other)
        self._fit()

    def _fit(self) -> None:
        """Minimize the squared errors, and each slope's square times its `spread`'s, one slope at a time (Friedman
        et al. 2010, "Regularization Paths for Generalized Linear Models via Coordinate Descent").
        """
        slopes, left = self.slopes, _MOST_OF * self.mean
        for _ in range(self._ROUNDS if len(slopes) > 1 else 1):
            for i, products in enumerate(self._products):
                others = sum([products[j] * slope for j, slope in enumerate(slopes) if j != i])
                slopes[i] = max(0.0, (self._covariances[i] - others) / (products[i] + self._ridge[i]))
        for i in reversed(range(len(slopes))):
            if self._means[i] > 0:
                slopes[i] = min(slopes[i], left / self._means[i])
                left -= slopes[i] * self._means[i]
