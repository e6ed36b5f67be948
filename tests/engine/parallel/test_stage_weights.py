"""The weights of a stage: counted from its shape, they are those that its decoder loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.loading.weights import load_decoder
from engine.model_config.config import ModelConfig
from engine.parallel.collective import Collective
from engine.parallel.division import divided
from engine.parallel.shard import Shard
from tests.engine.support.oracle import Tiny, save_tiny, tiny_models
from tests.engine.support.quantized_decoders import memory

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny_models(tmp_path_factory, lambda family: {})


def loaded(model: Path, config: ModelConfig, count: int, fp8: bool = False) -> list[int]:
    """Bytes of the weights of each stage's decoder."""
    return [
        memory(load_decoder(model, config, torch.float32, CPU, fp8=fp8, ranks=Collective(Shard(), stage=stage)))
        for stage in divided(config, count)
    ]


@pytest.mark.parametrize("family", ["llama2", "qwen3", "gemma3", "mixtral", "qwen3_moe_mixed"])
def test_a_stage_s_weights_are_those_that_it_loads(tiny: Tiny, family: str) -> None:
    config = ModelConfig.from_directory(tiny(family))
    for count in (1, 2, 3):
        counted = [stage.weight_bytes(config, 4) for stage in divided(config, count)]
        assert counted == loaded(tiny(family), config, count)
        norms = (count - 1) * 4 * config.hidden_size
        assert sum(counted) == config.weight_bytes(4) + norms, "each stage has the final norm"


def test_rounded_weights_of_a_stage_are_those_that_it_loads(tiny: Tiny) -> None:
    config = ModelConfig.from_directory(tiny("llama2"))
    counted = [stage.weight_bytes(config, 4, "fp8") for stage in divided(config, 3)]
    assert counted == loaded(tiny("llama2"), config, 3, fp8=True)
    assert sum(counted) < config.weight_bytes(4)


def test_all_stages_have_the_inputs_of_all_layers(tmp_path: Path) -> None:
    model = save_tiny("gemma4_small", tmp_path)
    config = ModelConfig.from_directory(model)
    counted = [stage.weight_bytes(config, 4) for stage in divided(config, 2)]
    factors = config.num_layers  # of layers, which are no weights
    assert sum(loaded(model, config, 2)) == sum(counted) + 4 * factors
