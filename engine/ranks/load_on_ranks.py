"""Starts the ranks of a model, on each of which a share of it is loaded."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.kv_tier.page_mover import PageMover
from engine.loading.load_model import load_model
from engine.model_config.config import ModelConfig
from engine.model_files.model_directory import resolve_model
from engine.parallel.division import stages_of
from engine.parallel.shard import check_context, check_copies, check_divides
from engine.ranks.launcher import LocalProcesses, WorkerLauncher
from engine.ranks.pipeline_runner import PipelineRunner
from engine.ranks.rank_group import RankGroup
from engine.ranks.runner import ParallelRunner
from engine.ranks.worker import device_name
from engine.runner.stage_runner import StageRunner
from engine.settings.config import EngineConfig


def load_on_ranks(
    config: EngineConfig,
    draft_kv_bytes: int = 0,
    launcher: WorkerLauncher | None = None,
    draft_bytes: int = 0,
    inner_layers: tuple[int, ...] = (),
) -> ParallelRunner:
    """Load a model as `load_model` does, on `config.num_ranks` ranks. Also raises RankLost."""
    launcher = launcher or LocalProcesses()
    directory = resolve_model(config.model, config.model_revision)
    device = _first_device(config, launcher.shares_gpus)
    model = ModelConfig.from_directory(directory).on(device.type)
    check_divides(model, config.tensor_parallel_size, config.expert_parallel)
    check_context(model, config.tensor_parallel_size, config.context_parallel_size)
    check_copies(model, config)
    starts = stages_of(model, config)[0].starts
    config = replace(
        config, model=str(directory), model_revision=None, served_name=config.name, device=device.type
    )
    rank_group = RankGroup.start(launcher, config.num_ranks, config.rank_interface)
    try:
        with rank_group.guarded():
            ranks = rank_group.join(config, device_name(device), device, starts)
            runner = load_model(config, draft_kv_bytes, ranks, draft_bytes=draft_bytes, inner_layers=inner_layers)
            if isinstance(runner.lower_tier, PageMover):
                runner.lower_tier.join(rank_group)
            if isinstance(runner, StageRunner):
                return PipelineRunner(runner, rank_group)
            return ParallelRunner(runner, rank_group, config.expert_copies_interval)
    except BaseException:
        rank_group.close()
        raise


def _first_device(config: EngineConfig, shares_gpus: bool) -> torch.device:
    """Return rank 0's device. Raises ValueError when there are fewer GPUs than ranks."""
    size, found = config.num_ranks, torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and not found):
        return torch.device("cpu")
    if found < (size if shares_gpus else 1):
        stages = config.pipeline_parallel_size
        times = "" if stages == 1 else f" and pipeline_parallel_size {stages}, which takes {size} GPUs"
        raise ValueError(
            f"tensor_parallel_size is {config.tensor_parallel_size}{times}, but this machine has {found} "
            f"GPU{'' if found == 1 else 's'}; use {found} or less, or a machine with more"
        )
    return torch.device("cuda", 0)
