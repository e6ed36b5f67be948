"""A model that several ranks compute, as its scheduler sees it: rank 0 reads each plan, and all run it.

loop ── prepare: Work to all ─▶ │ rank 0   copies, forward, sample ─┐ tokens
                                │ rank 1   copies, forward ◀────────┘
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from engine.config import EngineConfig
from engine.errors import RankLost
from engine.loading.hub import resolve_model
from engine.loading.load_model import load_model
from engine.models.config import ModelConfig
from engine.parallel.shard import check_divides
from engine.ranks.launcher import LocalProcesses, WorkerLauncher
from engine.ranks.messages import Work, on
from engine.ranks.rank_group import Team
from engine.ranks.worker import device_name
from engine.runner.model_runner import ModelRunner
from engine.runner.prepared_step import PreparedStep
from engine.scheduling.plan import Step, StepPlan, StepResult

_HOST = torch.device("cpu")


class ParallelRunner:
    """Rank 0's runner, and the others to whom it tells each step."""

    def __init__(self, runner: ModelRunner, team: Team) -> None:
        self._runner, self.team = runner, team
        self.model_config = runner.model_config
        self.num_pages, self.page_size = runner.num_pages, runner.page_size
        self.host_memory = runner.host_memory
        self.device, self.kv_dtype = runner.device, runner.kv_dtype
        self.attention_name = runner.attention_name
        self.max_model_len, self.fingerprint = runner.max_model_len, runner.fingerprint
        self.takes_all_cores, self.kv_bytes_per_token = runner.takes_all_cores, runner.kv_bytes_per_token

    @classmethod
    def load(
        cls, config: EngineConfig, kv_bytes_beside: int = 0, launcher: WorkerLauncher | None = None
    ) -> ParallelRunner:
        """As `load_model`, on `config.tensor_parallel_size` ranks. Raises RankLost too, when one ends."""
        launcher, size = launcher or LocalProcesses(), config.tensor_parallel_size
        directory = resolve_model(config.model)
        check_divides(ModelConfig.from_directory(directory), size, config.expert_parallel)
        device = _first_device(config, launcher.shares_gpus)
        config = replace(config, model=str(directory), served_name=config.name, device=device.type)
        team = Team.start(launcher, size)
        try:
            with team.guarded():
                ranks = team.join(config, device_name(device), device)
                return cls(load_model(config, kv_bytes_beside, ranks), team)
        except BaseException:
            team.close()
            raise

    def run(self, plan: StepPlan) -> StepResult:
        """Prepare a step and compute it at once."""
        return self.prepare(plan)()

    def prepare(self, plan: StepPlan) -> Step:
        """As `ModelRunner.prepare`. The step raises RankLost when it fails, whatever the reason: ranks that do not
        do the same cannot do anything together any more.
        """
        step = self._runner.read(plan, _HOST)
        self.team.send(Work.of(step))
        return partial(self._compute, on(step, self.device))

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        self.team.close()

    def _compute(self, step: PreparedStep) -> StepResult:
        try:
            with self.team.guarded():
                return self._runner.compute(step)
        except RankLost:
            raise
        except Exception as error:
            reason = f"rank 0 failed: {type(error).__name__}: {error}"
            self.team.lose(reason)
            raise RankLost(reason) from error


def _first_device(config: EngineConfig, shares_gpus: bool) -> torch.device:
    """Rank 0's. Raises ValueError where there are fewer GPUs than ranks."""
    size, found = config.tensor_parallel_size, torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and not found):
        return torch.device("cpu")
    if found < (size if shares_gpus else 1):
        raise ValueError(
            f"tensor_parallel_size is {size}, but this machine has {found} GPU{'' if found == 1 else 's'}; "
            f"lower it to {found} or less, or use a machine with more"
        )
    return torch.device("cuda", 0)
