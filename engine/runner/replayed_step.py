"""A step launched as a graph, until its tokens are on the host; the next one may be launched before that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.runner.stage_clock import StageClock
from engine.runner.token_reader import TokensUnderway
from engine.values.logprobs import TokenLogprobs
from engine.values.plan import StepResult


class ReplayedStep:
    """Implements `StepUnderway`."""

    def __init__(
        self,
        rows: Sequence[int],
        tokens: TokensUnderway,
        reports: Sequence[TokenLogprobs | None],
        stages: StageClock,
        *,
        is_replayed: bool,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """rows: the graph row of each chunk, the order of `tokens` and `reports`. `finish` waits for the step's
        other work.
        """
        self._rows, self._tokens, self._reports = rows, tokens, reports
        self._stages, self._is_replayed, self._finish = stages, is_replayed, finish

    def is_done_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for the tokens; returns whether they are there."""
        return self._tokens.is_done_within(seconds)

    def wait(self) -> StepResult:
        """Wait for the tokens and return the step's result."""
        sampled = self._tokens.wait()
        self._finish()
        return StepResult(
            [sampled[row] for row in self._rows],
            [self._reports[row] for row in self._rows],
            None,
            self._stages.prepare_seconds,
            self._stages.sample_seconds(),
            is_replayed=self._is_replayed,
        )
