"""Loading the model that an engine's settings name, on as many ranks as they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.model_runner import ModelRunner

if TYPE_CHECKING:
    from engine.parallel.launcher import WorkerLauncher
    from engine.parallel.runner import ParallelRunner


def load_runner(
    config: EngineConfig, kv_bytes_beside: int = 0, launcher: WorkerLauncher | None = None
) -> ModelRunner | ParallelRunner:
    """As `ModelRunner.load`; `launcher` starts ranks after the first, None: as processes of this machine."""
    if config.tensor_parallel_size == 1:
        return ModelRunner.load(config, kv_bytes_beside)
    from engine.parallel.runner import ParallelRunner  # msgspec, which a bare GPU machine lacks

    return ParallelRunner.load(config, kv_bytes_beside, launcher)
