"""Filling an engine's cache before it takes requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import NeverFits, QueueFull
from engine.loop import EngineLoop
from engine.request import Request


@dataclass(frozen=True, slots=True)
class Precomputed:
    """What came of it."""

    num_prompts: int = 0
    """Prompts computed to their end."""
    num_tokens: int = 0
    """Tokens that became reusable, those of unfinished prompts included."""
    seconds: float = 0.0


def precompute(loop: EngineLoop, requests: Iterable[Request], max_seconds: float) -> Precomputed:
    """Compute requests, in this order as far as the time goes, on a loop that has not been started.

    All that remains is their KV in the cache: what is unfinished at the end is aborted, nobody hears an event, and
    the engine's totals begin at 0 again, so that its hits and misses are those of its users.
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
    """Hand in what there is room for; what can never fit is left out."""
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
