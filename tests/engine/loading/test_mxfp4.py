"""Experts in four bits are widened to what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.base.errors import ModelLoadError
from engine.loading.weights import load_decoder
from engine.model_config.config import ModelConfig
from engine.models.decoder import Decoder
from engine.parallel.collective import Collective
from engine.parallel.shard import Shard
from tests.engine.support.oracle import save_tiny


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model with plain experts and with experts in four bits."""
    plain = save_tiny("gpt_oss", tmp_path_factory.mktemp("plain"))
    tensors = load_file(plain / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.randint(
            0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8
        )
        scales = torch.randint(120, 126, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, plain / "model.safetensors")
    quantized = tmp_path_factory.mktemp("quantized")
    kept = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in packed}
    save_file(kept | packed, quantized / "model.safetensors")
    raw = json.loads((plain / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (quantized / "config.json").write_text(json.dumps(raw))
    return plain, quantized


def load(model: Path, shard: Shard) -> Decoder:
    config = ModelConfig.from_directory(model)
    return load_decoder(model, config, torch.float32, torch.device("cpu"), ranks=Collective(shard))


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2), Shard(1, 2, splits_experts=True)], ids=str)
def test_each_rank_gets_the_same_experts(models: tuple[Path, Path], shard: Shard) -> None:
    plain, quantized = (load(model, shard) for model in models)
    for expected, found in zip(plain.parameters(), quantized.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_experts_that_are_missing_are_named(models: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((models[1] / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((models[0] / "model.safetensors").read_bytes())
    with pytest.raises(ModelLoadError, match=r"lack model.layers.0.mlp.experts.gate_up_proj_blocks"):
        load(tmp_path, Shard())
