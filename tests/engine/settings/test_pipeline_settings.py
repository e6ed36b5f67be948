"""The settings of a pipeline: their bounds, and how many steps are in flight by default."""

from __future__ import annotations

from typing import Any

import pytest

from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation


@pytest.mark.parametrize(
    ("settings", "num_micro_batches"),
    [
        ({}, 1),
        ({"pipeline_parallel_size": 4}, 4),
        ({"pipeline_parallel_size": 4, "micro_batches": 5}, 5),
        ({"pipeline_parallel_size": 4, "micro_batches": 1}, 1),
    ],
)
def test_there_are_as_many_micro_batches_as_stages_by_default(
    settings: dict[str, Any], num_micro_batches: int
) -> None:
    assert EngineConfig(**settings).num_micro_batches == num_micro_batches


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pipeline_parallel_size": 0}, r"pipeline_parallel_size must be in \[1, 64\], got 0"),
        ({"pipeline_parallel_size": 65}, r"pipeline_parallel_size must be in \[1, 64\], got 65"),
        ({"pipeline_parallel_size": 2, "micro_batches": 0}, r"micro_batches must be in \[1, 128\], got 0"),
        ({"pipeline_parallel_size": 2, "micro_batches": 129}, r"micro_batches must be in \[1, 128\], got 129"),
        ({"micro_batches": 2}, "one stage computes one step at a time"),
        ({"pipeline_parallel_size": 2, "device": "cuda:1"}, "pipeline_parallel_size is 2: device must be"),
        (
            {"pipeline_parallel_size": 2, "speculation": Speculation("mtp")},
            "'mtp' and pipeline_parallel_size is 2, but the first stage.* set pipeline_parallel_size to 1",
        ),
        (
            {"pipeline_parallel_size": 2, "speculation": Speculation("eagle3", model="x")},
            "'eagle3' and pipeline_parallel_size is 2, but the first stage.* or choose another method",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig(**settings)
