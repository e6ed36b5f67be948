"""How much memory loading takes at once, of every family: little more than the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading.weights import load_decoder
from engine.model_config.config import ModelConfig
from tests.engine.support.checkpoints import AWQ, FP8_BLOCKS, awq, fp8_blocks, make
from tests.engine.support.live_tensors import LiveTensors
from tests.engine.support.oracle import MORE_FAMILIES, save_tiny

NUM_LAYERS = 12
"""What is converted at once is at most a part of one layer."""


def peak_and_weights(model: Path) -> tuple[int, int]:
    """The most bytes alive while a model is loaded, and those of its weights."""
    config = ModelConfig.from_directory(model)
    with LiveTensors() as tensors:
        decoder = load_decoder(model, config, torch.float32, torch.device("cpu"))
    weights = sum(tensor.nbytes for tensor in [*decoder.parameters(), *decoder.buffers()])
    assert tensors.now >= weights, "all of them were counted"
    return tensors.peak, weights


_WINDOWS = [*["sliding_attention"] * 3, "full_attention"] * (NUM_LAYERS // 4)
_LISTED: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layers": [1, 0] * (NUM_LAYERS // 2)},
    "qwen3_5_moe": {"layer_types": ["linear_attention", "full_attention"] * (NUM_LAYERS // 2)},
    **{name: {"layer_types": _WINDOWS} for name in MORE_FAMILIES if name.startswith("gemma4")},
}
"""What lists something for each layer."""


@pytest.mark.parametrize("family", ["llama2", "mixtral", "qwen3_moe", *MORE_FAMILIES])
def test_a_plain_model(family: str, tmp_path: Path) -> None:
    layers: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS}
    layers |= _LISTED.get(family, {})
    peak, weights = peak_and_weights(save_tiny(family, tmp_path, **layers))
    assert weights <= peak <= 1.3 * weights


FORMATS: dict[str, tuple[Any, dict[str, Any], str, int]] = {
    "awq experts": (awq, AWQ, "mixtral", 3),
    "fp8 in blocks": (fp8_blocks, FP8_BLOCKS, "qwen3", NUM_LAYERS),
    "fp8 experts": (fp8_blocks, FP8_BLOCKS, "mixtral", 3),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_model(name: str, tmp_path: Path) -> None:
    *maker, num_layers = FORMATS[name]
    made = make(tmp_path, *maker, num_hidden_layers=num_layers)
    peak, weights = peak_and_weights(made.quantized)
    assert weights <= peak <= 1.3 * weights
