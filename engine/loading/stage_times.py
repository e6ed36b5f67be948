"""Measures the stages of a pipeline at the start, and says which number of layers each should have."""

from __future__ import annotations

import logging

from engine.loading.warm_up import decode_step
from engine.model_config.config import ModelConfig
from engine.parallel.collective import Collective
from engine.parallel.division import better_sizes
from engine.runner.stage_runner import StageRunner
from engine.settings.config import EngineConfig

logger = logging.getLogger(__name__)

_MOST_ROWS, _ROUNDS = 32, 5
_UNEVEN, _BRIEF_S = 1.2, 1e-3
"""A stage that takes so many times as long as the average, and longer than this, is worth a warning."""


def report_stages(runner: StageRunner, model: ModelConfig, config: EngineConfig, ranks: Collective) -> None:
    """Log the seconds of each stage for a step of decodes. All ranks call it together; `model` has all layers."""
    num_rows = min(_MOST_ROWS, config.max_running)
    layers_s, head_s = runner.measure(decode_step(num_rows, config.page_tokens), _ROUNDS)
    nanoseconds = ranks.all_of(round((layers_s + head_s) * 1e9), runner.device)
    if ranks.rank:
        return
    size = ranks.shard.size
    seconds = [max(nanoseconds[first : first + size]) / 1e9 for first in range(0, len(nanoseconds), size)]
    starts, times = ranks.stage.starts, ", ".join(f"{own * 1e3:.2f}" for own in seconds)
    logger.info("stages begin with layers %s and take %s ms for %d decodes", starts, times, num_rows)
    uneven = max(seconds) * len(seconds) / sum(seconds)
    better = better_sizes(model, ranks.stage, seconds, head_s)
    if (
        uneven > _UNEVEN
        and max(seconds) > _BRIEF_S
        and better != [len(own) for own in ranks.stage.all_layers(model.num_layers)]
    ):
        logger.warning(
            "stage %d takes %.1f times as long as the average: engine.pipeline_layers %s would divide the layers "
            "better by this measurement. Set it for all replicas alike, or they cannot exchange KV",
            seconds.index(max(seconds)),
            uneven,
            better,
        )
