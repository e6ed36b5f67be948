"""Fills an engine's prefix cache before it serves requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from engine.base.errors import NeverFits, QueueFull
from engine.program.loop import EngineLoop
from engine.values.request import Request


@dataclass(frozen=True, slots=True)
class Precomputed:
    """Counts of computed prompts and tokens."""

    num_prompts: int = 0
    """Prompts computed to their end."""
    num_tokens: int = 0
    """Tokens whose KV became reusable, including those of unfinished prompts."""
    seconds: float = 0.0

    def __add__(self, other: Precomputed) -> Precomputed:
        return Precomputed(
            self.num_prompts + other.num_prompts, self.num_tokens + other.num_tokens, self.seconds + other.seconds
        )


def precompute(loop: EngineLoop, requests: Iterable[Request], max_seconds: float) -> Precomputed:
    """Compute requests in order, for at most `max_seconds`, on a loop that has not been started.

    Only their KV in the cache remains: unfinished requests are aborted, deltas are dropped, and the engine's
    counters are reset, so that its hits and misses are those of real requests.
    """
    began = loop.clock()
    waiting, running, num_done = deque(requests), set[str](), 0
    while (waiting or running) and loop.clock() - began < max_seconds:
        _submit(loop, waiting, running)
        for event in loop.step():
            if event.finish_reason is not None:
                running.discard(event.request_id)
                num_done += event.finish_reason in ("stop", "length")
    for request_id in running:
        loop.abort(request_id)
    while loop.has_work:
        loop.step()
    num_tokens = loop.scheduler.cache.stats.inserted_tokens
    loop.forget_totals()
    return Precomputed(num_done, num_tokens, loop.clock() - began)


def _submit(loop: EngineLoop, waiting: deque[Request], running: set[str]) -> None:
    """Submit requests while there is room; skip those that can never fit."""
    while waiting:
        request = waiting.popleft()
        try:
            loop.submit(request)
            running.add(request.request_id)
        except NeverFits:
            continue
        except QueueFull:
            waiting.appendleft(request)
            return
