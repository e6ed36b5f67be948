"""A pipeline for scripted scenarios: its first stage computes each step as early as it can, its last as late."""

from __future__ import annotations

from collections.abc import Callable

from engine.values.plan import Step, StepPlan, StepResult
from engine.values.request import PENDING, Request
from tests.engine.support.memory_runner import MemoryRunner, Table, is_self_test


class PipelineRunner(MemoryRunner):
    """The last stage, which samples. It also notices steps that a pipeline cannot compute: with more steps in
    flight than there may be, with a request twice, or with a token that is not known yet.
    """

    def __init__(self, page_size: int, window: int, num_micro_batches: int, slowness: Callable[[], int]) -> None:
        """A step ends after it was looked at `slowness` times, unless the loop waits for it before that."""
        super().__init__(page_size, window)
        self.first = MemoryRunner(page_size, window)
        self.most_in_flight = 0
        """Most steps that were in flight at the same time."""
        self.num_in_flight = 0
        self._most, self._slowness = num_micro_batches, slowness
        self._sampled_for: set[Request] = set()  # requests whose next token a step in flight samples

    def prepare(self, plan: StepPlan) -> Step:
        """Send the step to both stages. It enters the first when it is called."""
        first, last = self.first.prepare(plan), super().prepare(plan)
        self.first.plans.clear()
        self._check(plan)

        def step() -> Underway:
            self.num_in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
            if self.num_in_flight > self._most:
                self.mistakes.append(f"{self.num_in_flight} steps are in flight")
            sampled = {chunk.request for chunk in plan.sampling_chunks}
            self._sampled_for |= sampled
            first()
            self.mistakes += self.first.mistakes

            def end() -> StepResult:
                self.num_in_flight -= 1
                self._sampled_for -= sampled
                found = last()
                assert isinstance(found, StepResult)
                return found

            return Underway(end, self._slowness())

        return step

    def _check(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            if chunk.request in self._sampled_for:
                self.mistakes.append(f"{chunk.request.request_id} is in two steps in flight")
            if PENDING in chunk.token_ids and not is_self_test(plan):
                self.mistakes.append(f"{chunk.request.request_id} has a token that no stage knows")

    def run(self, plan: StepPlan, tables: list[list[Table]]) -> StepResult:
        """Compute the step in the last stage. Steps that were in flight when one failed may have its requests."""
        self._lost = set(self.failed)
        return super().run(plan, tables)


class Underway:
    """A step in flight."""

    def __init__(self, end: Callable[[], StepResult], num_looks: int) -> None:
        self._end, self._num_looks = end, num_looks

    def is_done_within(self, seconds: float) -> bool:
        """Look at the step."""
        self._num_looks -= 1
        return self._num_looks < 0

    def wait(self) -> StepResult:
        """Let the last stage compute the step."""
        return self._end()
