"""A runner of a real model whose steps a test can hold back."""

from __future__ import annotations

import threading
from typing import Any

from engine.program.engine import LoadedRunner
from engine.values.plan import Step, StepPlan, StepResult, StepUnderway


class HeldRunner:
    """A runner whose steps wait while `gate` is clear, after `num_free` more, and take `step_s` longer."""

    def __init__(self, runner: LoadedRunner) -> None:
        self._runner = runner
        self.gate = threading.Event()
        self.gate.set()
        self.num_free = 10**9
        self.step_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def prepare(self, plan: StepPlan) -> Step:
        """Prepare a step that may wait."""
        step = self._runner.prepare(plan)

        def run() -> StepResult | StepUnderway:
            self.num_free -= 1
            if self.step_s:
                threading.Event().wait(self.step_s)
            if self.num_free < 0:
                self.gate.wait()
            return step()

        return run
