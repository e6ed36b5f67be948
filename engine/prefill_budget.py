"""How fast steps are, and so how many prompt tokens one may compute while running decodes keep their rhythm."""

from __future__ import annotations

import statistics
from collections import deque

_SMOOTHING = 0.2
# Below this a prompt makes no progress worth the step's fixed cost, and a step says little of the rate.
_MIN_TOKENS = 64
# A median of so many is not moved by one step that something else held up.
_NUM_PACES = 9
# Of a step; a clock may be coarse.
_MIN_SECONDS = 1e-5


class PrefillBudget:
    """Bounds a step's prefill by its tokens and, beside running decodes, by the time it may take.

    The time is predicted from measured steps, `seconds = base + per_token * tokens`: `base` follows pure decode
    steps, `per_token` those with prefill (exponential moving averages). Until both are known, tokens alone bound.
    """

    def __init__(self, max_step_tokens: int, max_step_seconds: float | None = None) -> None:
        self._max_tokens = max_step_tokens
        self._max_seconds = max_step_seconds
        self._base: float | None = None
        self._per_token: float | None = None
        # Seconds per token of the last whole steps, what they decode included. Not of the first: it is slow.
        self._paces: deque[float] = deque(maxlen=_NUM_PACES)
        self._is_first = True
        self._least_rate = 0.0  # of steps too small to measure by

    def observe(self, num_decode_tokens: int, num_prefill_tokens: int, seconds: float) -> None:
        """Learn from a finished step."""
        if num_prefill_tokens == 0:
            self._base = _smooth(self._base, seconds)
        elif num_prefill_tokens < _MIN_TOKENS:
            self._least_rate = max(self._least_rate, num_prefill_tokens / max(seconds, _MIN_SECONDS))
        else:
            if not self._is_first:
                self._paces.append(seconds / num_prefill_tokens)
            self._is_first = False
            cost = max(0.0, seconds - (self._base or 0.0) * bool(num_decode_tokens))
            self._per_token = _smooth(self._per_token, cost / num_prefill_tokens)

    def seconds(self, num_prefill_tokens: int) -> float:
        """How long a step with so many prompt tokens will probably take, decodes included; 0 until measured."""
        return (self._base or 0.0) + (self._per_token or 0.0) * num_prefill_tokens

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
        return self._base or 0.0

    def tokens(self, num_decodes: int) -> int:
        """Prompt tokens allowed in the next step beside `num_decodes` decoding requests."""
        room = self._max_tokens - num_decodes
        if num_decodes == 0 or self._max_seconds is None or not self._per_token or self._base is None:
            return room
        affordable = int((self._max_seconds - self._base) / self._per_token)
        return min(room, max(affordable, _MIN_TOKENS))


def _smooth(average: float | None, value: float) -> float:
    return value if average is None else average + _SMOOTHING * (value - average)
