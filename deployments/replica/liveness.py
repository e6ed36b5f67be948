"""Proves that an engine computes: by one step before it accepts requests, and by a file per replica afterwards.

The replica touches its file at each successful health check. Each of its other ranks (`ranks.py`) touches its own
file while its process lives. A supervisor outside Serve (a Kubernetes probe, `pod.py`) reads the age of the files
on its node: without a recent one, no engine there finishes steps.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

from engine.base.errors import EngineBroken
from engine.base.files import make_folder
from engine.program.engine import Engine
from engine.program.precompute import precompute
from engine.values.pooling import Pooling
from engine.values.sampling_params import SamplingParams


class EngineUnhealthy(RuntimeError):
    """The engine makes no progress: Serve should replace this replica."""


class Beat:
    """One replica's file, which is empty and as old as the last successful health check."""

    def __init__(self, directory: str | None, replica: str) -> None:
        """With None, there is no file. Creates the directory if it is missing. Raises OSError."""
        self._path = None if directory is None else Path(directory, replica)
        if self._path is not None:
            make_folder(self._path.parent)

    def mark(self) -> None:
        """Touch the file: the engine is healthy. If that fails, the file becomes old, as for an unhealthy one."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.touch()

    def clear(self) -> None:
        """Remove the file when the replica stops. Idempotent."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def prove_step(engine: Engine) -> None:
    """Compute one token on an engine whose loop has not started. Raises EngineUnhealthy when that fails.

    A failed step only ends its requests, so an engine with a broken device would otherwise look healthy.
    """
    pooling = Pooling(by_head="embed" not in engine.tasks) if engine.is_encoder else None
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=pooling)
    request = engine.new_request("proof", [0], sampling, salt="proof")
    try:
        done = precompute(engine.loop, [request], math.inf)
    except EngineBroken as error:
        raise EngineUnhealthy(f"the engine's first step failed: {error}") from error
    if done.num_prompts != 1:
        raise EngineUnhealthy("the engine's first step failed: see the traceback above in this replica's log")
    engine.cache.reset()  # no request will use that token
    engine.loop.forget_totals()
