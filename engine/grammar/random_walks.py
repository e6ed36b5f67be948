"""Writes random answers to a grammar, to find out before any request has it whether it can be followed, and how fast.

The answers are the same each time: only the time that they take differs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from engine.grammar.matcher import Matcher

_NUM_WALKS, _NUM_TOKENS = 3, 96
_ENOUGH_SECONDS = 0.1
"""Time after which it is known that a grammar is slow."""
_SLOW_SECONDS = 0.0005
"""Mean time for a token above which a grammar counts as slow."""


class Walked(NamedTuple):
    """What came of writing answers."""

    num_tokens: int
    """Tokens that were written, of all answers."""
    seconds: float
    """Processor time that their masks, and consuming them, took."""
    failed_at: int | None
    """Number of tokens after which the grammar could not be followed; None if it always could."""

    @property
    def mean_seconds(self) -> float:
        """Time for a token."""
        return self.seconds / max(self.num_tokens, 1)

    @property
    def is_slow(self) -> bool:
        """Whether another matcher should be tried."""
        return self.failed_at is not None or self.mean_seconds > _SLOW_SECONDS


def walked(initial: Matcher, ends: Collection[int]) -> Walked:
    """Write answers, of which each ends where only one of the tokens `ends` may follow."""
    num_tokens, began = 0, time.thread_time()
    for seed in range(_NUM_WALKS):
        draw, matcher = random.Random(seed), initial.deep_copy()
        for length in range(_NUM_TOKENS):
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            bits[list(ends)] = 0
            allowed = bits.nonzero()[0]
            seconds = time.thread_time() - began
            if matcher.is_error() and not matcher.get_error().startswith("NoExtension"):
                return Walked(num_tokens, seconds, length)
            if seconds > _ENOUGH_SECONDS:
                return Walked(num_tokens + 1, seconds, None)
            if not len(allowed) or not matcher.try_consume_tokens([int(draw.choice(allowed))]):
                break
            num_tokens += 1
    return Walked(num_tokens, time.thread_time() - began, None)
