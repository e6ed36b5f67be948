"""Proof that an engine computes: one step before it takes requests, and a mark for each health check it passes.

A supervisor outside Serve (a Kubernetes probe, `pod.py` beside this) reads the mark's age: an old one, or none,
means that no engine on this machine finishes steps.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

from engine.engine import Engine
from engine.precompute import precompute
from engine.sampling_params import SamplingParams


class EngineUnhealthy(RuntimeError):
    """The engine makes no progress: Serve should replace this replica."""


class Beat:
    """One replica's mark: an empty file, as old as the last health check that passed."""

    def __init__(self, directory: str | None, replica: str) -> None:
        """None leaves no marks. The directory is made when it is missing. Raises OSError."""
        self._path = None if directory is None else Path(directory, replica)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def mark(self) -> None:
        """The engine is well, now. A mark that cannot be made grows old, which tells the supervisor enough."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.touch()

    def clear(self) -> None:
        """The replica is going. Idempotent."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def prove_step(engine: Engine) -> None:
    """Compute one token on an engine whose loop has not started. Raises EngineUnhealthy when that fails.

    A step that fails ends its requests and no more, so an engine whose device is broken would otherwise look well.
    """
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    request = engine.new_request("proof", [0], sampling, salt="proof")
    if precompute(engine.loop, [request], math.inf).num_prompts != 1:
        raise EngineUnhealthy("the engine's first step failed: see the traceback above in this replica's log")
    engine.cache.reset()  # nobody asks for that token again
    engine.loop.forget_totals()
