"""The runner of a model that several ranks share: rank 0 reads each plan, and all ranks run it.

loop ── prepare: StepTask to all ───▶ │ rank 0   copies, forward, sample ─┐ tokens
                                  │ rank 1   copies, forward ◀────────┘
loop ── prepare: ReplayTask to all ─▶ │ rank 0   rows, graph: forward, choose
                                  │ rank 1   rows, graph: forward, choose, the same logits and so the same tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from engine.base.errors import RankLost
from engine.graphs.decode_graphs import GraphStep
from engine.kv_tier.page_mover import PageMover
from engine.loading.load_model import load_model
from engine.model_config.config import ModelConfig
from engine.model_files.model_directory import resolve_model
from engine.parallel.shard import check_divides
from engine.parallel.stage import starts_of_stages
from engine.ranks.launcher import LocalProcesses, WorkerLauncher
from engine.ranks.messages import ReplayTask, StepTask, to_device
from engine.ranks.pages_of_ranks import PagesOfRanks
from engine.ranks.rank_group import RankGroup
from engine.ranks.worker import device_name
from engine.runner.model_runner import ModelRunner
from engine.runner.prepared_step import PreparedStep
from engine.runner.stage_runner import StageRunner
from engine.settings.config import EngineConfig
from engine.values.plan import Step, StepPlan, StepResult, StepUnderway, result_of

_HOST = torch.device("cpu")


class ParallelRunner:
    """Runs steps on rank 0 and sends each step to the other ranks."""

    is_encoder = False

    def __init__(self, runner: ModelRunner, rank_group: RankGroup) -> None:
        self._runner, self.rank_group = runner, rank_group
        self.model_config = runner.model_config
        self.num_pages, self.page_size = runner.num_pages, runner.page_size
        self.num_state_slots, self.layer_groups = runner.num_state_slots, runner.layer_groups
        self.host_memory = runner.host_memory
        self.lower_tier = runner.lower_tier
        own = runner.page_memory
        self.page_memory = None if own is None else PagesOfRanks(own, rank_group)
        self.device, self.kv_dtype = runner.device, runner.kv_dtype
        self.attention_name = runner.attention_name
        self.max_model_len, self.fingerprint = runner.max_model_len, runner.fingerprint
        self.takes_all_cores, self.kv_bytes_per_token = runner.takes_all_cores, runner.kv_bytes_per_token

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        draft_kv_bytes: int = 0,
        launcher: WorkerLauncher | None = None,
        draft_bytes: int = 0,
    ) -> ParallelRunner:
        """Load a model as `load_model` does, on `config.num_ranks` ranks. Also raises RankLost."""
        launcher = launcher or LocalProcesses()
        directory = resolve_model(config.model, config.model_revision)
        model = ModelConfig.from_directory(directory)
        check_divides(model, config.tensor_parallel_size, config.expert_parallel)
        starts = starts_of_stages(model, config.pipeline_parallel_size)
        device = _first_device(config, launcher.shares_gpus)
        config = replace(
            config, model=str(directory), model_revision=None, served_name=config.name, device=device.type
        )
        rank_group = RankGroup.start(launcher, config.num_ranks, config.rank_interface)
        try:
            with rank_group.guarded():
                ranks = rank_group.join(config, device_name(device), device, starts)
                runner = load_model(config, draft_kv_bytes, ranks, draft_bytes=draft_bytes)
                if isinstance(runner.lower_tier, PageMover):
                    runner.lower_tier.join(rank_group)
                if isinstance(runner, StageRunner):
                    from engine.ranks.pipeline_runner import PipelineRunner

                    return PipelineRunner(runner, rank_group)
                return cls(runner, rank_group)
        except BaseException:
            rank_group.close()
            raise

    def run(self, plan: StepPlan) -> StepResult:
        """Prepare a step and compute it immediately."""
        return result_of(self.prepare(plan)())

    def prepare(self, plan: StepPlan) -> Step:
        """Prepare a step as `ModelRunner.prepare` does, and send it to the other ranks.

        The step raises RankLost whenever it fails: if not all ranks ran it, they cannot run another one together.
        """
        if (placed := self._runner.place(plan)) is not None:
            self.rank_group.send(ReplayTask.of(placed))
            return partial(self._replay, placed)
        step = self._runner.read(plan, _HOST)
        self.rank_group.send(StepTask.of(step))
        return partial(self._compute, to_device(step, self.device))

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        self.rank_group.close()

    def _compute(self, step: PreparedStep) -> StepResult:
        with self.losing():
            return self._runner.compute(step)

    def _replay(self, step: GraphStep) -> StepUnderway:
        with self.losing():
            return _SharedStep(self._runner.replay(step), self)

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


def _first_device(config: EngineConfig, shares_gpus: bool) -> torch.device:
    """Return rank 0's device. Raises ValueError when there are fewer GPUs than ranks."""
    size, found = config.num_ranks, torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and not found):
        return torch.device("cpu")
    if found < (size if shares_gpus else 1):
        raise ValueError(
            f"tensor_parallel_size times pipeline_parallel_size is {size}, but this machine has {found} GPU{'' if found == 1 else 's'}; "
            f"lower one of them, or use a machine with more"
        )
    return torch.device("cuda", 0)
