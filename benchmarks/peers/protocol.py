"""How an engine is driven: a process of its own, one JSON document a line on stdin and stdout.

    in    settings: {"model": DIR, "precision": "bfloat16", "threads": 2, ...}
    out   {"version": "0.32.0"} once the model is loaded
    in    a job: {"prompts": [[ids], ...], "max_tokens": [n, ...]}
    out   {"seconds": 1.2, "tokens": [[ids], ...]}, and so on until stdin ends

Everything else that an engine prints goes to stderr. Imports nothing but the standard library: every peer's own
interpreter runs it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TextIO

Precision = Literal["bfloat16", "float32"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The same for all engines."""

    model: str
    """Directory of the checkpoint."""
    precision: Precision
    """Precision of weights, activations and KV."""
    threads: int
    max_requests: int
    """Most requests at a time."""
    max_len: int
    """Tokens of the longest request."""
    kv_tokens: int
    """Room for KV, in tokens: no job needs more."""
    device: str = "cpu"
    """Of Raydix's engine; peers are installed for CPUs."""


@dataclass(frozen=True, slots=True)
class Job:
    """Requests handed in at once, answered greedily; the clock stops when the last has its last token."""

    prompts: list[list[int]]
    max_tokens: list[int]
    """How many tokens each is answered with: an end of text stops nothing."""

    @property
    def num_prompt(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output(self) -> int:
        return sum(self.max_tokens)


class Engine(Protocol):
    """A peer behind its adapter."""

    version: str

    def generate(self, job: Job) -> list[list[int]]:
        """The tokens of every answer, in order."""
        ...


def serve(load: Callable[[Settings], Engine]) -> None:
    """An adapter's main: load, then answer jobs until stdin ends."""
    out = _private_stdout()
    engine = load(Settings(**json.loads(sys.stdin.readline())))
    _say(out, {"version": engine.version})
    for line in sys.stdin:
        job = Job(**json.loads(line))
        gc.collect()  # the engine's own garbage, not what reading the job left
        start = time.perf_counter()
        tokens = engine.generate(job)
        _say(out, {"seconds": time.perf_counter() - start, "tokens": tokens})


def _private_stdout() -> TextIO:
    """Our own way out, after which descriptor 1, inherited by whatever the engine starts, is stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _say(out: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=out, flush=True)


def encode(message: Settings | Job) -> str:
    """A line for an adapter's stdin."""
    return json.dumps(asdict(message)) + "\n"
