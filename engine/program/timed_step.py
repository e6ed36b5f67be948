"""A step on its way through the runner: its duration, and whether its device still computes it."""

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
        """The launched step, if its device had not finished it by then."""
        self.clock = clock
        try:
            self._step = runner.prepare(plan)
        except Exception as error:  # `run` raises it, as if the step itself had failed.
            self._step = partial(_raise, error)

    @classmethod
    def prepared(cls, runner: Runner, plan: StepPlan, clock: Callable[[], float]) -> tuple[TimedStep, float]:
        """Prepare a step; returns it, and the seconds that this took."""
        before = clock()
        return cls(runner, plan, clock), clock() - before

    def run(self) -> StepResult | StepUnderway:
        """Execute the step, or launch it. Call exactly once."""
        self.began = self.clock()
        try:
            found = self._step()
        finally:
            self.seconds = self.clock() - self.began
        if not isinstance(found, StepResult):
            self.underway = found
        return found

    def wait(self, underway: StepUnderway, done_at: float) -> StepResult:
        """Wait for the step's result. Its time begins when the device ends the one before, at `done_at`."""
        assert self.began is not None
        try:
            return underway.wait()
        finally:
            self.seconds = self.clock() - max(self.began, done_at)


class InFlight(NamedTuple):
    """A step that was launched, and whose result is not applied yet."""

    plan: StepPlan
    step: TimedStep
    launched: Launched[StepResult | StepUnderway]
    schedule: float = 0.0
    """Seconds that its planning took."""
    prepare: float = 0.0
    """Seconds that its preparation took in this thread."""

    def is_done_by(self, moment: float) -> bool:
        """Wait up to `moment` on the loop's clock for the end of the step; returns whether it has ended."""
        clock = self.step.clock
        if not self.launched.is_done_within(max(moment - clock(), 0.0)):
            return False
        underway = self.step.underway
        return underway is None or underway.is_done_within(max(moment - clock(), 0.0))

    def wait(self, done_at: float) -> StepResult:
        """Wait for the step's result. The device ended the step before at `done_at`. Raises the error with which
        the step failed.
        """
        found = self.launched.wait()
        return found if isinstance(found, StepResult) else self.step.wait(found, done_at)


def _raise(error: Exception) -> NoReturn:
    raise error
