"""How many prompt tokens a step may compute, so that running decodes keep their rhythm."""

from __future__ import annotations

_SMOOTHING = 0.2
# Below this a prompt makes no progress worth the step's fixed cost.
_MIN_TOKENS = 64


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

    def observe(self, num_decode_tokens: int, num_prefill_tokens: int, seconds: float) -> None:
        """Learn from a finished step."""
        if num_prefill_tokens == 0:
            self._base = _smooth(self._base, seconds)
        elif num_prefill_tokens >= _MIN_TOKENS:
            cost = max(0.0, seconds - (self._base or 0.0) * bool(num_decode_tokens))
            self._per_token = _smooth(self._per_token, cost / num_prefill_tokens)

    def tokens(self, num_decodes: int) -> int:
        """Prompt tokens allowed in the next step beside `num_decodes` decoding requests."""
        room = self._max_tokens - num_decodes
        if num_decodes == 0 or self._max_seconds is None or not self._per_token or self._base is None:
            return room
        affordable = int((self._max_seconds - self._base) / self._per_token)
        return min(room, max(affordable, _MIN_TOKENS))


def _smooth(average: float | None, value: float) -> float:
    return value if average is None else average + _SMOOTHING * (value - average)
