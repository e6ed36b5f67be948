"""Layers for multi-token prediction in a model's files: stored in eight bits, unused, missing and misplaced."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.base.errors import ModelLoadError
from engine.layers.linear import Fp8Linear
from engine.loading.check_model import check_model
from engine.loading.load_model import load_model
from engine.models.mtp import MTPDecoder
from engine.program.engine import Engine
from engine.program.load_with_layer import load_with_layer
from tests.engine.support.checkpoints import (
    FP8_BLOCKS,
    LINEAR,
    configure,
    fp8_blocks,
    fp8_channels,
    fp8_config,
    rewrite,
)
from tests.engine.support.mtp_models import NAMES, reference_drafts, save_with_mtp
from tests.engine.support.oracle import Tiny, save_tiny
from tests.engine.support.rank_processes import Threads
from tests.engine.support.watched_drafts import FEW, config_of, run_both


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The directory of a family's tiny model with an MTP layer."""
    return cache(lambda family: save_with_mtp(family, tmp_path_factory.mktemp(family) / "model"))


@pytest.mark.parametrize(("form", "num_ranks"), [("channels", 1), ("channels", 2), ("blocks", 2), ("plain", 1)])
def test_a_layer_in_eight_bits_drafts(tmp_path: Path, form: str, num_ranks: int) -> None:
    """The files have its matrices in float8, as published ones do, or loading rounds them. Most of its drafts are
    those of the unrounded layer.
    """
    plain = save_with_mtp("glm4_moe", tmp_path / "model")
    directory = shutil.copytree(plain, tmp_path / "rounded")
    if form != "plain":
        rewrite(directory, partial(store_in_fp8, fp8_blocks if form == "blocks" else fp8_channels))
        configure(directory, **(FP8_BLOCKS if form == "blocks" else fp8_config()))
    prompts = [list(range(first, first + 9)) for first in (20, 30, 40, 50)]
    settings: dict[str, Any] = {"quantization": "fp8" if form == "plain" else None, "threads": 1}
    config = config_of(directory, tensor_parallel_size=num_ranks, **settings)
    # Ranks round the activations that they share with scales of their own.
    watched = run_both(config, prompts, launcher=Threads(), on_one_rank=False)
    layer = watched.drafter._layer.decoder
    assert isinstance(layer, MTPDecoder)
    assert isinstance(layer.get_submodule("layers.0.attention.o_proj"), Fp8Linear)
    assert type(layer.get_submodule("projection")) is torch.nn.Linear
    drafts = [(tokens, draft[:1]) for tokens, _, draft in watched.drafts if draft]
    expected = [reference_drafts("glm4_moe", plain, tokens, 1, bias=FEW["logit_bias"]) for tokens, _ in drafts]
    equal = sum(draft == other for (_, draft), other in zip(drafts, expected, strict=True))
    assert equal > 0.7 * len(drafts) > 20


def store_in_fp8(store: Callable[[str, torch.Tensor], Any], weights: dict[str, torch.Tensor]) -> None:
    for name, tensor in list(weights.items()):
        if LINEAR.fullmatch(name):
            del weights[name]
            weights |= store(name.removesuffix(".weight"), tensor)[0]


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_the_layer_is_reported_as_unused_only_where_it_is(
    model: Tiny, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = config_of(model(family))
    load_with_layer(config)
    assert "not used of" in caplog.text and "tensors: " not in caplog.text
    load_model(dataclasses.replace(config, speculation=None))
    assert f"tensors: {NAMES[family][0].split('.')[0]}." in caplog.text


# --- what is refused ------------------------------------------------------------------------------------------


def changed(directory: Path, target: Path, name: str, tensor: torch.Tensor | None) -> Path:
    """Copy a model with another tensor of this name, or without it."""
    target.mkdir()
    (target / "config.json").write_text((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    del weights[name]
    save_file(
        {**weights, **({} if tensor is None else {name: tensor})}, target / "model.safetensors", {"format": "pt"}
    )
    return target


def test_weights_without_the_layer_are_refused(model: Tiny, tmp_path: Path) -> None:
    broken = changed(model("glm4_moe"), tmp_path / "broken", "model.layers.3.eh_proj.weight", None)
    with pytest.raises(ModelLoadError, match=r"lack model.*eh_proj\.weight: they were saved without the MTP"):
        Engine.from_config(config_of(broken))
    with pytest.raises(ModelLoadError, match=r"lack model\.layers\.3\.eh_proj\.weight"):
        check_model(config_of(broken))
    Engine.from_config(config_of(broken, speculation=None)).close()


@pytest.mark.parametrize("name", ["model.layers.3.eh_proj.weight", "model.layers.3.self_attn.o_proj.weight"])
def test_weights_of_another_shape_are_refused(model: Tiny, tmp_path: Path, name: str) -> None:
    broken = changed(model("glm4_moe"), tmp_path / "broken", name, torch.zeros(96, 5))
    with pytest.raises(ModelLoadError, match=rf"{name} has shape \(96, 5\), but .* by config.json"):
        Engine.from_config(config_of(broken))


def test_a_family_without_the_layer_is_refused(tmp_path: Path) -> None:
    llama = save_tiny("llama2", tmp_path / "llama")
    with pytest.raises(ValueError, match="knows no MTP layer of LlamaForCausalLM; DeepSeek-V3"):
        Engine.from_config(config_of(llama))
