"""Weights of published checkpoints: the loader expects the names and shapes of transformers' classes."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
import transformers

from engine.layers.linear import QuantizedLinear
from engine.loading.targets import weight_targets
from engine.loading.weights import plan_loading
from engine.model_config.config import ModelConfig
from engine.models.decoder import Decoder
from engine.parallel.collective import ALONE
from engine.parallel.shard import Shard
from tests.engine.support.published_models import PUBLISHED, PUBLISHED_QUANTIZED


def their_weights(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of each weight and buffer of transformers' own model, made without memory."""
    fields = copy.deepcopy(raw)
    kind = fields.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        model = getattr(transformers, raw["architectures"][0])._from_config(config)
    return dict(_as_in_files(name, tuple(tensor.shape), raw) for name, tensor in model.state_dict().items())


def _as_in_files(name: str, shape: tuple[int, ...], raw: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """MiniMax's files call MLPs what Mixtral's do."""
    return name.replace(".mlp.", ".block_sparse_moe.") if "MiniMaxM2" in str(raw) else name, shape


def is_one_expert(name: str) -> bool:
    """Whether a tensor is of one expert. The classes stack them in memory; gpt-oss' files do that too."""
    return re.search(r"\.experts\.\d+\.", name) is not None


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    raw = dict(PUBLISHED[name])
    config = ModelConfig.from_json(raw, {}, name)
    theirs = their_weights(raw)
    ours = {key: target.shape for key, target in weight_targets(config, Shard(), theirs).items()}
    if any(is_one_expert(key) for key in ours):
        stacked = {key: shape for key, shape in theirs.items() if ".experts." in key}
        alone = [shape for key, shape in ours.items() if is_one_expert(key)]
        assert sum(map(math.prod, stacked.values())) == sum(map(math.prod, alone))
        theirs = {key: shape for key, shape in theirs.items() if key not in stacked}
        ours = {key: shape for key, shape in ours.items() if not is_one_expert(key)}
    assert ours.items() <= theirs.items()
    left = [key for key in theirs if key not in ours and not (config.tied_embeddings and key == "lm_head.weight")]
    assert all(key.startswith(config.names.left_out or ("none",)) for key in left), left[:5]
    with torch.device("meta"):
        assert sum(p.numel() for p in Decoder(config).parameters()) >= config.num_parameters


def test_experts_of_quantized_checkpoints_have_the_tensors_of_their_format() -> None:
    """Those of the first and last expert, as each format's description has them. All layers are alike."""
    at = "mlp.experts.{}.gate_proj"
    expected = {
        "Qwen/Qwen3-30B-A3B-FP8": (3, f"{at}.weight_scale_inv", 127, (6, 16)),
        "Qwen/Qwen3-30B-A3B-GPTQ-Int4": (3, f"{at}.qweight", 127, (2048 // 8, 768)),
        "a Qwen3-30B-A3B in AWQ": (3, f"{at}.qweight", 127, (2048, 768 // 8)),
        "a Mixtral-8x7B in AWQ": (3, "block_sparse_moe.experts.{}.w1.qzeros", 7, (4096 // 128, 14336 // 8)),
        "deepseek-ai/DeepSeek-V3-0324": (3, f"{at}.weight", 255, (2048, 7168)),
        "moonshotai/Kimi-K2-Thinking": (3, f"{at}.weight_packed", 383, (2048, 7168 // 8)),
    }
    for name, (layer, tensor, last, shape) in expected.items():
        config = ModelConfig.from_json({**PUBLISHED_QUANTIZED[name], "num_hidden_layers": 4}, {}, name)
        decoder, targets, groups = plan_loading(config, ALONE, {}, config.weight_format)
        shapes = {tensor.name: tensor.shape for group in groups for tensor in group.tensors}
        for expert in (0, last):
            assert shapes[f"model.layers.{layer}.{tensor.format(expert)}"] == shape, name
        assert len(shapes) > len(targets), name
        kept = sum(isinstance(module, QuantizedLinear) for module in decoder.modules())
        assert config.experts is not None
        assert kept >= 2 * len(config.experts.layers) * (last + 1), name
        assert config.weight_bytes(2) < 1.3 * config.num_parameters, name


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "text_config" in PUBLISHED[name]])
def test_a_text_model_inside_another_is_found_wherever_it_was_saved(name: str) -> None:
    """transformers has moved it twice: files have "language_model.model.", the classes "model.language_model."."""
    config = ModelConfig.from_json(PUBLISHED[name], {}, name)
    now = weight_targets(config, Shard(), {"model.language_model.embed_tokens.weight"})
    then = weight_targets(config, Shard(), {"language_model.model.embed_tokens.weight"})
    moved = [re.sub("^model.language_model.", "language_model.model.", key) for key in now]
    assert list(then) == [f"language_model.{key}" if key == "lm_head.weight" else key for key in moved]
