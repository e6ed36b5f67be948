"""The settings of context parallelism: their bounds."""

from __future__ import annotations

from typing import Any

import pytest

from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation


def test_ranks_divide_the_kv_into_as_many_parts_as_are_set() -> None:
    config = EngineConfig(tensor_parallel_size=8, context_parallel_size=4, ring_attention_tokens=1)
    assert (config.context_parallel_size, config.ring_attention_tokens, config.num_ranks) == (4, 1, 8)
    assert EngineConfig(tensor_parallel_size=8).context_parallel_size == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"context_parallel_size": 0}, r"context_parallel_size must be in \[1, 64\], got 0"),
        (
            {"context_parallel_size": 65, "tensor_parallel_size": 65},
            r"context_parallel_size must be in \[1, 64\], got 65",
        ),
        ({"ring_attention_tokens": 0}, r"ring_attention_tokens must be in \[1, 1048576\], got 0"),
        ({"ring_attention_tokens": 2**20 + 1}, r"ring_attention_tokens must be in \[1, 1048576\], got 1048577"),
        (
            {
                **{"tensor_parallel_size": 8, "context_parallel_size": 8, "page_size": 64},
                "speculation": Speculation(method="draft_model", model="demo"),
            },
            "'draft_model', and page_size 64 times context_parallel_size 8 is more than 256, the most",
        ),
        (
            {
                **{"tensor_parallel_size": 8, "context_parallel_size": 8, "page_size": 64},
                "speculation": Speculation(method="mtp"),
            },
            "'mtp', and page_size 64 times context_parallel_size 8 is more than 256, the most",
        ),
        (
            {"context_parallel_size": 2},
            "context_parallel_size is 2, which does not divide tensor_parallel_size 1:",
        ),
        (
            {"context_parallel_size": 3, "tensor_parallel_size": 4},
            r"context_parallel_size is 3, which does not divide tensor_parallel_size 4: .* to a multiple",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig(**settings)
