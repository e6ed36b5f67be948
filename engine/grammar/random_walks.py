"""Writes random answers to a grammar before any request uses it, to find out how fast it can be followed.

The answers are the same each time: only the time that they take differs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from engine.grammar.matcher import GrammarMatcher

_LENGTHS = (1000, 100, 100)
"""Most tokens of each answer. A long one shows whether the time for a token grows with the answer."""
_ENOUGH_SECONDS = 0.1


class Walked(NamedTuple):
    """The result of writing answers."""

    num_tokens: int
    """Tokens of all answers."""
    seconds: float
    """Processor time that their masks, and consuming them, took."""
    failed_at: int | None
    """Number of tokens after which the grammar could not be followed; None if it always could."""

    @property
    def mean_seconds(self) -> float:
        """Time for a token."""
        return self.seconds / max(self.num_tokens, 1)


def walked(initial: GrammarMatcher, ends: Collection[int]) -> Walked:
    """Write answers. Each ends where only one of the tokens `ends` may follow."""
    num_tokens, began = 0, time.thread_time()
    for seed, most in enumerate(_LENGTHS):
        draw, matcher = random.Random(seed), initial.deep_copy()
        before = num_tokens
        while num_tokens < before + most:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            bits[list(ends)] = 0
            allowed = bits.nonzero()[0]
            seconds = time.thread_time() - began
            if seconds > _ENOUGH_SECONDS:
                return Walked(num_tokens + 1, seconds, None)
            if not len(allowed) or not matcher.try_consume_tokens([int(draw.choice(allowed))]):
                break
            num_tokens += 1
        if _has_failed(matcher):
            return Walked(num_tokens, time.thread_time() - began, num_tokens - before)
    return Walked(num_tokens, time.thread_time() - began, None)


def _has_failed(matcher: GrammarMatcher) -> bool:
    """Whether following the grammar took too many resources. A state without a next token is another fault."""
    return matcher.is_error() and not matcher.get_error().startswith("NoExtension")
