"""Experts in MXFP4 stay packed on GPUs and are widened for CPUs, to what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.base.errors import ModelLoadError
from engine.layers.mxfp4_linear import Mxfp4Linear
from engine.loading.check_model import check_model
from engine.loading.load_model import load_model
from engine.loading.weights import load_decoder
from engine.model_config.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.experts import Experts
from engine.models.native_decoder import NativeDecoder
from engine.parallel.collective import Collective
from engine.parallel.shard import Shard, check_divides
from engine.settings.config import EngineConfig
from engine.values.plan import StepPlan
from tests.engine.support.checkpoints import Checkpoint, mxfp4_gpt_oss
from tests.engine.support.oracle import oracle_logits, random_ids
from tests.engine.support.quantized_decoders import load_packed, memory
from tests.engine.support.steps_by_hand import RequestByHand, load_runner

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two ranks can share it, and four cannot."""
    return mxfp4_gpt_oss(tmp_path_factory.mktemp("gpt_oss"))


def load(model: Path, shard: Shard, device: str = "cpu", **settings: Any) -> Decoder:
    """Load a model as such a device would, into a CPU's memory."""
    config, ranks = ModelConfig.from_directory(model).on(device), Collective(shard)
    return load_decoder(model, config, torch.float32, CPU, ranks=ranks, **settings)


SHARDS = [Shard(), Shard(1, 2), Shard(0, 2, splits_experts=True), Shard(1, 2, splits_experts=True)]


@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_each_rank_gets_the_same_experts(models: Checkpoint, shard: Shard) -> None:
    plain, widened = (load(model, shard) for model in (models.plain, models.quantized))
    for expected, found in zip(plain.parameters(), widened.parameters(), strict=True):
        assert torch.equal(expected, found)
    packed = dict(load(models.quantized, shard, "cuda").named_modules())
    for name, experts in plain.named_modules():
        if isinstance(experts, Experts):
            first, second = packed[name].matrices_apart
            for layers, stacked in ((first, experts.gate_up_proj), (second, experts.down_proj)):
                assert all(isinstance(layer, Mxfp4Linear) for layer in layers)
                assert torch.equal(torch.stack([layer.dequantized() for layer in layers]), stacked)


def test_packed_experts_take_the_memory_that_is_counted(models: Checkpoint) -> None:
    """Seventeen bytes hold 32 numbers. Other matrices may be rounded to float8 when they are loaded."""
    config = ModelConfig.from_directory(models.quantized)
    numbers = 3 * 4 * 3 * 96 * 192
    for quantization in (None, "fp8"):
        plain, packed = (
            memory(load(model, Shard(), "cuda", fp8=quantization == "fp8"))
            for model in (models.plain, models.quantized)
        )
        assert packed == config.weight_bytes(4, quantization) == plain - numbers * 4 + numbers // 32 * 17
        assert plain == config.on("cpu").weight_bytes(4, quantization)
        assert config.expert_weight_bytes(4, quantization) == 17 / 32
    assert config.on("cpu").expert_weight_bytes(4) == 4
    assert config.weight_bytes(4, "int8") == config.on("cpu").weight_bytes(4, "int8")


def test_logits_of_packed_experts_are_those_of_transformers(models: Checkpoint) -> None:
    """A prompt in two chunks, then a token. Torch widens expert by expert."""
    tokens = random_ids(6, 30)
    expected = oracle_logits(models.plain, tokens, torch.float64)
    config = EngineConfig(
        str(models.quantized), device="cpu", attention="reference", kv_pages=8, page_size=16, threads=1
    )
    runner = load_model(config, load_weights=load_packed)
    assert isinstance(runner.decoder, Decoder)
    for start, end in ((0, 20), (20, 29), (29, 30)):
        got = runner.logits(StepPlan((RequestByHand(tokens[:end], range(2), computed=start).chunk(),)))
        assert (got[0] - expected[end - 1]).abs().max() < 1e-4


def test_a_cpu_widens_experts_for_its_native_kernels(models: Checkpoint) -> None:
    tokens = random_ids(6, 30)
    runner = load_runner(models.quantized, device="cpu")
    assert isinstance(runner.decoder, NativeDecoder)
    got = runner.logits(StepPlan((RequestByHand(tokens, range(2)).chunk(),)))
    assert (got[0] - oracle_logits(models.plain, tokens, torch.float64)[-1]).abs().max() < 1e-4


def test_ranks_share_whole_groups_of_inner_columns(models: Checkpoint) -> None:
    """192 columns are six groups of 32, which four ranks cannot share; where they are widened, ranks can."""
    config = ModelConfig.from_directory(models.quantized)
    check_divides(config, 2)
    said = r"size is 4.* 6 groups of 32 inner columns of an expert evenly.* 1, 2, and with expert_parallel also 4$"
    with pytest.raises(ValueError, match=said):
        check_divides(config, 4)
    check_divides(config.on("cpu"), 4)
    check_divides(config, 4, splits_experts=True)
    for device, fault in (("cpu", "no usable tokenizer"), ("cuda", "6 groups of 32 inner columns of an expert")):
        with pytest.raises(ValueError, match=fault):
            check_model(EngineConfig(str(models.quantized), device=device, tensor_parallel_size=4))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_that_are_missing_are_named(models: Checkpoint, tmp_path: Path, device: str) -> None:
    (tmp_path / "config.json").write_text((models.quantized / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((models.plain / "model.safetensors").read_bytes())
    with pytest.raises(ModelLoadError, match=r"lack model.layers.0.mlp.experts.gate_up_proj_blocks"):
        load(tmp_path, Shard(), device)
