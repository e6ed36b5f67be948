"""A pipeline on simulated time: the real scheduler, cache and loop, and stages that each take a known time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from engine.values.plan import Step, StepPlan, StepResult
from tests.engine.support.simulated_time import SimulatedEngine


class SimulatedPipeline(SimulatedEngine):
    """Each stage computes the steps in their order, `seconds` each. Time passes only while the loop waits."""

    def __init__(
        self,
        num_stages: int = 2,
        micro_batches: int | None = None,
        seconds: Callable[[StepPlan], float] = lambda plan: 1.0,
        **limits: Any,
    ) -> None:
        super().__init__(seconds, micro_batches=micro_batches or num_stages, **limits)
        self.begins: list[float] = []
        """When each step was called."""
        self.failing: dict[int, Exception] = {}
        """The number of a step, and the error with which it fails."""
        self._free_at = [0.0] * num_stages
        self._later: list[tuple[float, int, Callable[[], object]]] = []

    def prepare(self, plan: StepPlan) -> Step:
        """Prepare a step, which enters the first stage when it is called."""

        def step() -> SimulatedStep:
            number, at = len(self.plans), self.now
            self.plans.append(plan)
            self.begins.append(self.now)
            for stage, free_at in enumerate(self._free_at):
                at = self._free_at[stage] = max(at, free_at) + self._seconds(plan)
            num_sampled = len(plan.sampling_chunks)
            result = StepResult((1,) * num_sampled, (None,) * num_sampled)
            return SimulatedStep(self, at, self.failing.get(number, result))

        return step

    def at(self, moment: float, do: Callable[[], object]) -> None:
        """Call `do` when it is `moment`."""
        heapq.heappush(self._later, (moment, len(self._later), do))

    def let_pass(self, until: float) -> None:
        """Let time pass."""
        while self._later and self._later[0][0] <= until:
            moment, _, do = heapq.heappop(self._later)
            self.now = max(self.now, moment)
            do()
        self.now = max(self.now, until)


class SimulatedStep:
    """A step in flight."""

    def __init__(self, pipeline: SimulatedPipeline, done_at: float, result: StepResult | Exception) -> None:
        self._pipeline, self._done_at, self._result = pipeline, done_at, result

    def is_done_within(self, seconds: float) -> bool:
        """Wait up to `seconds`."""
        self._pipeline.let_pass(min(self._done_at, self._pipeline.now + seconds))
        return self._done_at <= self._pipeline.now

    def wait(self) -> StepResult:
        """Wait until the last stage has computed the step."""
        self._pipeline.let_pass(self._done_at)
        if isinstance(self._result, Exception):
            raise self._result
        return self._result
