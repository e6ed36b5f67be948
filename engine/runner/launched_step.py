"""A step launched on a GPU, until its tokens are on the host; the next one may be launched before that."""

from __future__ import annotations

from collections.abc import Callable

from engine.runner.stage_clock import StageClock
from engine.runner.token_reader import TokensUnderway
from engine.values.plan import StepResult


class LaunchedStep:
    """Implements `StepUnderway`."""

    def __init__(
        self,
        tokens: TokensUnderway,
        stages: StageClock,
        result: Callable[[list[int], float, float], StepResult],
        finish: Callable[[], None],
    ) -> None:
        """result: maps the tokens, and the seconds before the forward pass and after it, to the step's result.
        `finish` waits for the step's other work.
        """
        self._tokens, self._stages, self._result, self._finish = tokens, stages, result, finish

    def is_done_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for the tokens; returns whether they are there."""
        return self._tokens.is_done_within(seconds)

    def wait(self) -> StepResult:
        """Wait for the tokens and return the step's result."""
        sampled = self._tokens.wait()
        sample_s = self._stages.sample_seconds()
        self._finish()
        return self._result(sampled, self._stages.prepare_seconds, sample_s)
