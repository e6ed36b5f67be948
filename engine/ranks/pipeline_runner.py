"""The runner of a model in stages, on the first stage's first rank: several steps are on their way at a time.

loop ── prepare: StepTask to all ───▶ │ stage 0  begin A   begin B   finish A   begin C ...
                                      │ stage 1            begin A   begin B          ...
receiver ◀── A's hidden states ───────┘
loop ── FinishTask to stage 0 ──▶ tokens of A

The device thread runs `begin` and `finish` in the order in which the loop asks for them. The other ranks of the
stage do so in the same order, because the loop sends them a task for each.
"""

from __future__ import annotations

from functools import partial

import torch

from engine.attention.pinned import to_device
from engine.ranks.messages import FinishTask, StepTask
from engine.ranks.rank_group import RankGroup
from engine.ranks.runner import ParallelRunner
from engine.runner.device_thread import DeviceThread, Launched
from engine.runner.prepared_step import PreparedStep
from engine.runner.stage_runner import Begun, StageRunner, needed
from engine.values.plan import Step, StepPlan, StepResult

_HOST = torch.device("cpu")


class PipelineRunner(ParallelRunner):
    """Sends each step through all stages. Call its steps in one thread; they return before they are done."""

    def __init__(self, runner: StageRunner, rank_group: RankGroup) -> None:
        super().__init__(runner, rank_group)
        self.num_stages, self._stage_size, self._stage = runner.num_stages, runner.stage_size, runner
        self._device = DeviceThread[Begun | StepResult]()
        self._receiver = DeviceThread[torch.Tensor]()

    def prepare(self, plan: StepPlan) -> Step:
        """Prepare a step and send it to the other ranks. Raises RankLost as `ParallelRunner.prepare` does."""
        step = self._stage.read(plan, _HOST)
        self.rank_group.send(StepTask.of(step))
        return partial(self._launch, to_device(step, self.device))

    def finish(self, begun: Begun, received: torch.Tensor | None) -> StepResult:
        """Compute a step's result from the hidden states that have come back."""
        self.rank_group.send(FinishTask(), self._stage_size)
        result = self._device.launch(partial(self._stage.finish, begun, received)).wait()
        assert isinstance(result, StepResult)
        return result

    def _launch(self, step: PreparedStep) -> _StepInStages:
        begun = self._device.launch(partial(self._stage.begin, step))
        returned = None
        if step.batch is not None:
            returned = self._receiver.launch(partial(self._receive, len(needed(step))))
        return _StepInStages(self, begun, returned)

    def _receive(self, num_rows: int) -> torch.Tensor:
        """Wait for the next hidden states; on a GPU in a stream of their own, as others compute meanwhile."""
        if self.device.type != "cuda":
            return self._stage.receive(num_rows)
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.Stream(self.device)):
            received = self._stage.receive(num_rows)
            torch.cuda.current_stream(self.device).synchronize()
            return received


class _StepInStages:
    """A step on its way through the stages. Implements `StepUnderway`."""

    def __init__(
        self, runner: PipelineRunner, begun: Launched[Begun | StepResult], returned: Launched[torch.Tensor] | None
    ) -> None:
        """`returned`: its hidden states from the last stage; None if it has no tokens."""
        self._runner, self._begun, self._returned = runner, begun, returned

    def is_done_within(self, seconds: float) -> bool:
        """Wait up to `seconds` until the step has come back."""
        return (self._begun if self._returned is None else self._returned).is_done_within(seconds)

    def wait(self) -> StepResult:
        """Wait until the step has come back, and return its result. Raises RankLost."""
        with self._runner.losing():
            begun = self._begun.wait()
            assert isinstance(begun, Begun)
            return self._runner.finish(begun, None if self._returned is None else self._returned.wait())
