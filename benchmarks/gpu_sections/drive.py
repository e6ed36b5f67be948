"""Requests through an engine's own loop, and when their tokens came."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count

from engine.base.errors import QueueFull
from engine.program.engine import Engine
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams

_names = count()
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Trace:
    """Trace of requests. Times are seconds since the first was submitted."""

    tokens: list[list[int]]
    """Generated tokens, by request."""
    first: list[float]
    """When each request's first token came."""
    cached: list[int]
    """Prompt tokens that were found in the cache."""
    arrived: list[float]
    """The time at which each request was submitted."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """When a step's tokens came, and how many."""

    @property
    def seconds(self) -> float:
        """Seconds until the last token."""
        return self.steps[-1][0]


def drive(
    engine: Engine,
    prompts: Sequence[list[int]],
    outputs: Sequence[int],
    asked: SamplingParams = _GREEDY,
    *,
    arrivals: Sequence[int] | None = None,
) -> Trace:
    """Generate `outputs` tokens after `prompts`, as `asked`. Raises RuntimeError when a request fails.

    arrivals: after how many steps with tokens each is submitted, ascending; None: all immediately.
    """
    requests: list[Request] = []
    started = time.perf_counter()
    for prompt, length in zip(prompts, outputs, strict=True):
        sampling = replace(asked, max_tokens=length, ignore_eos=True, seed=len(requests))
        requests.append(engine.new_request(f"r{next(_names)}", prompt, sampling))
    count = len(requests)
    trace = Trace([[] for _ in requests], [0.0] * count, [0] * count, [0.0] * count)
    index = {request.request_id: at for at, request in enumerate(requests)}
    waiting, num_open = deque(requests), len(requests)
    while num_open:
        with suppress(QueueFull):
            while waiting and (arrivals is None or arrivals[index[waiting[0].request_id]] <= len(trace.steps)):
                engine.scheduler.add(waiting[0], time.perf_counter())
                trace.arrived[index[waiting.popleft().request_id]] = time.perf_counter() - started
        events = engine.loop.step()
        now = time.perf_counter() - started
        for event in events:
            at = index[event.request_id]
            if event.finish_reason == "error":
                raise RuntimeError(f"request {at} of {len(requests)} failed: {event.error}")
            if event.token_ids and not trace.tokens[at]:
                trace.first[at] = now
            trace.tokens[at] += event.token_ids
            if event.finish_reason is not None:
                trace.cached[at] = event.num_cached
                num_open -= 1
        if num_tokens := sum(len(event.token_ids) for event in events):
            trace.steps.append((now, num_tokens))
    while engine.loop.has_work:  # the step that was in flight when the last one ended
        engine.loop.step()
    short = [at for at, length in enumerate(outputs) if len(trace.tokens[at]) != length]
    if short:
        raise RuntimeError(f"{len(short)} of {len(requests)} requests ended early, the first is {short[0]}")
    return trace
