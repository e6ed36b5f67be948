"""Empties the caches of all replicas of a model, and reports how much each one freed, or an error."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence, Set

from deployments.client.protocol import ModelState, Unavailable
from deployments.wire.deadlines.time_limit import timeout

logger = logging.getLogger("ray.serve")

RETRY_S = 0.1
"""Seconds until replicas that have not answered are asked again."""


async def empty_caches(
    model: str,
    known: Callable[[], Set[str]],
    ask: Callable[[], Awaitable[Sequence[tuple[str, int] | BaseException]]],
    state: Callable[[], Awaitable[ModelState | None]],
    timeout_s: float,
) -> dict[str, int]:
    """Ask until each replica that is `known` has answered; return the pages that each one freed.

    An ingress that has just started, or the Serve handle that asks, may know a replica later than others do. So a
    model of which no replica is known has no cache only in a `state` other than "loaded".
    Raises Unavailable when a replica fails, or has not answered in time.
    """
    freed = Counter[str]()
    try:
        with timeout(timeout_s):
            while True:
                if not freed and not known() and await state() not in ("loaded", None):
                    return {}
                answers = await ask()
                failed = [answer for answer in answers if isinstance(answer, BaseException)]
                if failed:
                    logger.warning("%s: caches were not emptied: %s", model, failed[0])
                    raise Unavailable(
                        f"{len(failed)} of {len(answers)} replicas of {model} did not empty their caches"
                    )
                freed.update(dict(answer for answer in answers if not isinstance(answer, BaseException)))
                if freed and freed.keys() >= known():
                    return dict(freed)
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        missing = ", ".join(sorted(known() - freed.keys())) or "any, as none is known"
        raise Unavailable(
            f"these replicas of {model} have not emptied their caches within {timeout_s:g} seconds "
            f"(health.status_timeout_s): {missing}"
        ) from None
