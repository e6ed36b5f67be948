"""The value of KV that leaves with its replica, per second that it takes to send it to another one.

    stream    others compute all of its tokens if its replica ends before it: it counts as likely as that is
    prefix    others compute it at its next use, and only then: it counts as likely as that comes soon

Both are tokens that others need not compute. A transfer takes some time besides that of its bytes, so of two with
equal chances the longer is worth more per second.
"""

from __future__ import annotations

import math

from router.cost import REUSE_S
from router.fetch.hot_prefixes import HotPrefix

NUM_AT_ONCE = 2
"""Transfers in progress from a replica whose time is short: one is placed while another uses the link. If more
share the link, all of them arrive late, and fewer in time."""
TRANSFER_S = 0.1
"""Seconds of each transfer besides those of its bytes: the request is placed, waits for a step and begins."""


def moving_seconds(num_tokens: int, rate: float) -> float:
    """Return the seconds in which so many tokens' KV is moved, at `rate` tokens/s."""
    return TRANSFER_S + num_tokens / rate


def worth_of_prefix(prefix: HotPrefix, rate: float, horizon_s: float = REUSE_S) -> float:
    """Return the tokens saved per second of moving what only one replica holds of a prefix.

    Each part of it counts by the probability that it is used within `horizon_s`.
    """
    first, last = prefix.elsewhere, len(prefix.token_ids)
    saved, uses_per_s, end = 0.0, 0.0, last
    for length, more in [*reversed(prefix.uses), (first, 0.0)]:
        start = min(max(length, first), last)
        saved += (end - start) * -math.expm1(-uses_per_s * horizon_s)
        uses_per_s, end = uses_per_s + more, start
    return saved / moving_seconds(last - first, rate)


def worth_of_stream(num_tokens: int, rate: float, chance: float) -> float:
    """Return the tokens saved per second of moving a stream with so many tokens, which is lost with a `chance`."""
    return chance * num_tokens / moving_seconds(num_tokens, rate)


def chance_of_running(seconds: float, finish_rate: float, num_running: int) -> float:
    """Return the probability that a stream has not ended by itself after so many seconds, at a replica that
    finishes `finish_rate` of its `num_running` streams per second.

    1 for an infinite time: a replica that is waited for ends sooner without the stream.
    """
    return 1.0 if math.isinf(seconds) else math.exp(-seconds * finish_rate / max(num_running, 1))
