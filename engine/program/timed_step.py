"""A step on its way through the runner: how long it takes, and whether its device still has to do it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, NoReturn

from engine.runner.device_thread import Launched
from engine.values.plan import Runner, StepPlan, StepResult, StepUnderway


class TimedStep:
    """A prepared step that measures how long it takes."""

    def __init__(self, runner: Runner, plan: StepPlan, clock: Callable[[], float]) -> None:
        self.began: float | None = None
        self.seconds = 0.0
        self.underway: StepUnderway | None = None
        """The step once it was launched, if its device then still had to do it."""
        self._clock = clock
        try:
            self._step = runner.prepare(plan)
        except Exception as error:  # raised when the step runs, as if it had failed there
            self._step = partial(_raise, error)

    def run(self) -> StepResult | StepUnderway:
        """Execute the step, or launch it. Call exactly once."""
        self.began = self._clock()
        try:
            found = self._step()
        finally:
            self.seconds = self._clock() - self.began
        if not isinstance(found, StepResult):
            self.underway = found
        return found

    def wait(self, underway: StepUnderway, done_at: float) -> StepResult:
        """Wait for the step's result. Its time begins when the device ends the one before, at `done_at`."""
        assert self.began is not None
        try:
            return underway.wait()
        finally:
            self.seconds = self._clock() - max(self.began, done_at)


class InFlight(NamedTuple):
    """A prepared step, which runs already if steps have a thread of their own."""

    plan: StepPlan
    step: TimedStep
    launched: Launched[StepResult | StepUnderway] | None
    """None if it runs when its result is asked for."""
    schedule: float = 0.0
    """Seconds that planning it took."""
    prepare: float = 0.0
    """Seconds that preparing it took in this thread."""


def _raise(error: Exception) -> NoReturn:
    raise error
