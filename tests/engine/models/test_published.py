"""Weights of published checkpoints: the loader expects the names and shapes of transformers' classes."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
import transformers

from engine.loading.targets import weight_targets
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.parallel.shard import Shard
from tests.engine.support.published_models import PUBLISHED


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


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "text_config" in PUBLISHED[name]])
def test_a_text_model_inside_another_is_found_wherever_it_was_saved(name: str) -> None:
    """transformers has moved it twice: files have "language_model.model.", the classes "model.language_model."."""
    config = ModelConfig.from_json(PUBLISHED[name], {}, name)
    now = weight_targets(config, Shard(), {"model.language_model.embed_tokens.weight"})
    then = weight_targets(config, Shard(), {"language_model.model.embed_tokens.weight"})
    moved = [re.sub("^model.language_model.", "language_model.model.", key) for key in now]
    assert list(then) == [f"language_model.{key}" if key == "lm_head.weight" else key for key in moved]
