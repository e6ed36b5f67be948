"""A model behind `raydix serve`: all requests together, with one ingress and several, by the client of least cost.

    direct       as it ships
    unbounded    with an engine that bounds its steps by tokens only, as `LLM` and other engines do

The larger workload is a published one: 500 requests of 512 tokens, answered with 128 each. With Qwen3-0.6B in
bfloat16 on an H100, vLLM's server answered 94.9 of them per second.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_sections.messages import Inapplicable, Measurement

_NEEDED = ("ray", "psutil", "httpx", "fastapi", "safetensors", "tokenizers")


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that are sent together."""

    requests: int
    prompt: int
    output: int
    rounds: int

    def __str__(self) -> str:
        return f"{self.requests} x {self.prompt} to {self.output}"


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of which servers."""

    model: str
    """Of `benchmarks/peers/models.py`."""
    bursts: tuple[Burst, ...]
    servers: tuple[tuple[str, int], ...]
    """Names (`benchmarks/peers/servers.py`) and numbers of ingresses."""


FULL = Load(
    "qwen3-0.6b",
    (Burst(128, 256, 64, 5), Burst(500, 512, 128, 2)),
    (("direct", 1), ("unbounded", 1), ("direct", 4)),
)
TINY = Load("llama-15m", (Burst(6, 12, 6, 1),), (("direct", 1),))


def server(load: Load, model: str, device: torch.device, directory: Path) -> Iterator[Measurement]:
    """Yield a line for each server and burst: output tokens per second, the median of the rounds."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise Inapplicable(f"{', '.join(missing)} not installed")
    from benchmarks.peers.models import CONFIGS, FIRST_WORD, make_model
    from benchmarks.peers.process import REPOSITORY
    from benchmarks.peers.protocol import Precision, Settings
    from benchmarks.peers.servers import serving

    path, vocabulary = make_model(load.model, directory), CONFIGS[load.model]["vocab_size"]
    most = max(burst.requests for burst in load.bursts)
    longest = max(burst.prompt + burst.output for burst in load.bursts) + 16
    precision: Precision = "bfloat16" if device.type == "cuda" else "float32"
    threads = len(os.sched_getaffinity(0))
    settings = Settings(str(path), precision, threads, most, longest, most * longest, device.type)
    for name, ingresses in load.servers:
        with serving(name, settings, REPOSITORY / ".peers", ingresses) as running:
            host, port = running.url.removeprefix("http://").split(":")
            for burst in load.bursts:
                rounds = []
                for number in range(burst.rounds + 1):
                    draw = random.Random(f"{burst} {number}")
                    bodies = [
                        _body(
                            running.model,
                            [draw.randrange(FIRST_WORD, vocabulary - 1) for _ in range(burst.prompt)],
                            burst,
                        )
                        for _ in range(burst.requests)
                    ]
                    rounds.append(asyncio.run(_seconds(host, int(port), bodies)))
                yield _line(
                    f"server, {name}, {ingresses} ingress{'es' * (ingresses > 1)}: {burst}",
                    model,
                    burst,
                    rounds[1:],
                )


def _body(model: str, prompt: Sequence[int], burst: Burst) -> dict[str, Any]:
    asked = {"model": model, "prompt": prompt, "max_tokens": burst.output}
    return asked | {"temperature": 0, "ignore_eos": True, "stream": True}


async def _seconds(host: str, port: int, bodies: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Return seconds until the last answer has ended, and medians to the first event and between events."""
    from benchmarks.stream_client import all_at_once

    answers = await all_at_once(host, port, bodies, "/v1/completions")
    began = min(answer.sent_at for answer in answers)
    gaps = [gap for answer in answers for gap in answer.gaps] or [0.0]
    ended = max(answer.ended_at for answer in answers)
    return ended - began, median(answer.ttft for answer in answers), median(gaps)


def _line(what: str, model: str, burst: Burst, rounds: Sequence[tuple[float, float, float]]) -> Measurement:
    taken, first, gap = (median(values) for values in zip(*rounds, strict=True))
    rates = sorted(burst.requests * burst.output / seconds for seconds, _, _ in rounds)
    note = (
        f"{burst.requests / taken:.1f} requests/s; first event {1000 * first:.1f} ms, between events "
        f"{1000 * gap:.1f} ms; {len(rounds)} rounds, {rates[0]:,.0f} to {rates[-1]:,.0f} tokens/s"
    )
    return Measurement(what, model, tokens_per_s=median(rates), ms=1000 * taken, note=note)
