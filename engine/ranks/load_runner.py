"""Loads the model that an engine's settings name, on one rank or on several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.loading.load_model import load_model
from engine.runner.model_runner import ModelRunner
from engine.settings.config import EngineConfig

if TYPE_CHECKING:
    from engine.ranks.launcher import WorkerLauncher
    from engine.ranks.runner import ParallelRunner


def load_runner(
    config: EngineConfig,
    draft_kv_bytes: int = 0,
    launcher: WorkerLauncher | None = None,
    draft_bytes: int = 0,
    inner_layers: tuple[int, ...] = (),
) -> ModelRunner | ParallelRunner:
    """Load the model as `load_model` does, on `config.num_ranks` ranks; `draft_bytes` and `inner_layers` are those
    of the first.

    `launcher` starts the ranks after the first; None starts them as processes of this machine.
    """
    if config.num_ranks == 1:
        return load_model(config, draft_kv_bytes, draft_bytes=draft_bytes, inner_layers=inner_layers)
    from engine.ranks.load_on_ranks import load_on_ranks  # imports msgspec, which a bare GPU machine lacks

    return load_on_ranks(config, draft_kv_bytes, launcher, draft_bytes, inner_layers)
