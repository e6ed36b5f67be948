"""Makes up an hour of chat: conversations grow turn by turn, and all begin with the same system prompt."""

from __future__ import annotations

import json
import random
from pathlib import Path

from deployments.simulator.fleet.trace import Trace, TraceRequest

BLOCK = 512


def conversations(num_requests: int = 1200, seed: int = 1, tick: float = 3.0) -> Trace:
    """Long prompts with a long tail, turns a minute or so apart, times rounded down to ticks."""
    rng = random.Random(seed)
    fresh = iter(range(1, 10**9))
    requests: list[TraceRequest] = []
    while len(requests) < num_requests:
        start = rng.uniform(0, 3000)
        blocks: tuple[int, ...] = (0,)
        for _ in range(min(int(rng.expovariate(1 / 3)) + 1, 12)):
            blocks += tuple(next(fresh) for _ in range(1 + int(rng.lognormvariate(1.8, 1.0))))
            num_tokens = len(blocks) * BLOCK - rng.randrange(BLOCK)
            requests.append(TraceRequest(start // tick * tick, num_tokens, rng.randrange(1, 600), blocks))
            start += rng.expovariate(1 / 90)
            if num_tokens % BLOCK:
                blocks = (*blocks[:-1], next(fresh))  # a partial block goes on: whole, it is another one
    requests.sort(key=lambda request: request.time)
    return Trace("conversations", tuple(requests[:num_requests]), BLOCK, True)


def steady(seconds: float, per_second: float, num_tokens: int, num_output: int = 20) -> Trace:
    """Requests that are all alike, at even distances, and share nothing."""
    size = -(-num_tokens // BLOCK)
    requests = (
        TraceRequest(number / per_second, num_tokens, num_output, tuple(range(number * size, (number + 1) * size)))
        for number in range(round(seconds * per_second))
    )
    return Trace("steady", tuple(requests), BLOCK, True)


def write_mooncake(path: Path, trace: Trace) -> Path:
    """Write the trace in the format of the published Mooncake traces and return its path."""
    lines = [
        json.dumps(
            {
                "timestamp": int(request.time * 1000),
                "input_length": request.num_tokens,
                "output_length": request.num_output,
                "hash_ids": list(request.blocks),
            }
        )
        for request in trace.requests
    ]
    path.write_text("\n".join(lines) + "\n")
    return path
