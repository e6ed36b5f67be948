"""The value of KV that leaves with its replica, per second that it takes to send it to another one.

    stream    others compute all of its tokens if its replica ends before it: it counts 1 use
    prefix    others compute it at its next use, and only then: it counts as likely as that use is

Both are tokens that others need not compute. A transfer takes some time besides that of its bytes, so of two with
equal chances the longer is worth more per second.
"""

from __future__ import annotations

import math

from router.cost import REUSE_S
from router.fetch.hot_prefixes import HotPrefix

TRANSFER_S = 0.1
"""Seconds of each transfer besides those of its bytes: the request is placed, waits for a step and begins."""


def moving_seconds(num_tokens: int, rate: float) -> float:
    """Return the seconds in which so many tokens' KV is moved, at `rate` tokens/s."""
    return TRANSFER_S + num_tokens / rate


def expected_tokens(prefix: HotPrefix, horizon_s: float = REUSE_S) -> float:
    """Return the tokens that others would have to compute if what only its replica holds of a prefix was lost.

    Each part of it counts by the probability that it is used within `horizon_s`.
    """
    first, last = prefix.elsewhere, len(prefix.token_ids)
    total, rate, end = 0.0, 0.0, last
    for length, uses_per_s in reversed(prefix.uses):
        start = min(max(length, first), last)
        total += (end - start) * -math.expm1(-rate * horizon_s)
        rate, end = rate + uses_per_s, start
    return total + (end - first) * -math.expm1(-rate * horizon_s)


def worth_of_prefix(prefix: HotPrefix, rate: float) -> float:
    """Return the tokens saved per second of moving what only one replica holds of a prefix."""
    return expected_tokens(prefix) / moving_seconds(len(prefix.token_ids) - prefix.elsewhere, rate)


def worth_of_stream(num_tokens: int, rate: float) -> float:
    """Return the tokens saved per second of moving a stream with so many tokens."""
    return num_tokens / moving_seconds(num_tokens, rate)
