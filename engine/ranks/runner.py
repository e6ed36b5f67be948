"""The runner of a model that several ranks share: rank 0 reads each plan, and all ranks run it.

loop ── prepare: StepTask to all ───▶ │ rank 0   copies, forward, sample ─┐ tokens
                                  │ rank 1   copies, forward ◀────────┘
loop ── prepare: ReplayTask to all ─▶ │ rank 0   rows, graph: forward, choose
                                  │ rank 1   rows, graph: forward, choose, the same logits and so the same tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from engine.attention.pinned import to_device
from engine.base.errors import RankLost
from engine.graphs.decode_graphs import GraphStep
from engine.models.expert_copies import Changes, CopyChooser
from engine.ranks.messages import CopyExperts, ReplayTask, StepTask
from engine.ranks.pages_of_ranks import PagesOfRanks
from engine.ranks.rank_group import RankGroup
from engine.runner.model_runner import ModelRunner
from engine.runner.prepared_step import PreparedStep
from engine.values.plan import Step, StepPlan, StepResult, StepUnderway, result_of

_HOST = torch.device("cpu")


class ParallelRunner:
    """Runs steps on rank 0 and sends each step to the other ranks."""

    is_encoder = False

    def __init__(self, runner: ModelRunner, rank_group: RankGroup, copies_interval: int = 0) -> None:
        """`copies_interval`: steps after which copies of experts are chosen again, if there is room for any."""
        self._copies: CopyChooser | None = None
        if runner.expert_copies is not None and runner.expert_load is not None:
            self._copies = CopyChooser(runner.expert_copies, runner.expert_load, copies_interval)
        self.first = runner
        """The runner of rank 0."""
        self.rank_group = rank_group
        self.model_config = runner.model_config
        self.num_pages, self.page_size = runner.num_pages, runner.page_size
        self.num_state_slots, self.layer_groups = runner.num_state_slots, runner.layer_groups
        self.host_memory = runner.host_memory
        self.lower_tier = runner.lower_tier
        own = runner.page_memory
        self.page_memory = None if own is None else PagesOfRanks(own, rank_group, runner.part_bytes)
        self.device, self.kv_dtype = runner.device, runner.kv_dtype
        self.attention_name, self.expert_load = runner.attention_name, runner.expert_load
        self.max_model_len, self.fingerprint = runner.max_model_len, runner.fingerprint
        self.takes_all_cores, self.kv_bytes_per_token = runner.takes_all_cores, runner.kv_bytes_per_token

    def run(self, plan: StepPlan) -> StepResult:
        """Prepare a step and compute it immediately."""
        return result_of(self.prepare(plan)())

    def prepare(self, plan: StepPlan) -> Step:
        """Prepare a step as `ModelRunner.prepare` does, and send it to the other ranks.

        The step raises RankLost whenever it fails: if not all ranks ran it, they cannot run another one together.
        """
        if (placed := self.first.place(plan)) is not None:
            return partial(self._replay, placed, self._send(ReplayTask.of(placed)))
        step = self.first.read(plan, _HOST)
        changes = self._send(StepTask.of(step))
        return partial(self._compute, to_device(step, self.device), changes)

    def _send(self, task: StepTask | ReplayTask) -> Changes:
        """Send a step to the other ranks; returns the copies of experts that all ranks change before it."""
        changes = {} if self._copies is None else self._copies.next_changes()
        if changes:
            self.rank_group.send(CopyExperts(changes))
        self.rank_group.send(task)
        return changes

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        self.rank_group.close()

    def _compute(self, step: PreparedStep, changes: Changes) -> StepResult | StepUnderway:
        with self.losing():
            if changes:
                self.first.place_copies(changes)
            found = self.first.compute(step)
            return found if isinstance(found, StepResult) else _SharedStep(found, self)

    def _replay(self, step: GraphStep, changes: Changes) -> StepUnderway:
        with self.losing():
            if changes:
                self.first.place_copies(changes)
            return _SharedStep(self.first.replay(step), self)

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Turn any error into a RankLost, and end all other ranks."""
        try:
            with self.rank_group.guarded():
                yield
        except RankLost:
            raise
        except Exception as error:
            reason = f"rank 0 failed: {type(error).__name__}: {error}"
            self.rank_group.lose(reason)
            raise RankLost(reason) from error


class _SharedStep:
    """A step that was sent to all ranks. Implements `StepUnderway`."""

    def __init__(self, step: StepUnderway, runner: ParallelRunner) -> None:
        self._step, self._runner = step, runner

    def is_done_within(self, seconds: float) -> bool:
        """Implement `StepUnderway`."""
        with self._runner.losing():
            return self._step.is_done_within(seconds)

    def wait(self) -> StepResult:
        """Implement `StepUnderway`."""
        with self._runner.losing():
            return self._step.wait()
