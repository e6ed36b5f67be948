"""Which layers share pages: exact for published models, and every layer in a place of its own."""

from __future__ import annotations

from typing import Any

import pytest

from engine.loading.windowed import layer_groups
from engine.model_config.config import ModelConfig
from engine.model_config.layer_groups import LayerGroups
from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation
from engine.settings.kv_tier import KVTier
from tests.engine.support.published_models import PUBLISHED

GEMMA, GPT_OSS = "google/gemma-3-27b-it", "openai/gpt-oss-20b"


def model(name: str) -> ModelConfig:
    return ModelConfig.from_json(PUBLISHED[name], {}, name)


def groups_of(name: str) -> LayerGroups:
    groups = LayerGroups.of(model(name))
    assert isinstance(groups, LayerGroups)
    return groups


@pytest.mark.parametrize(
    ("name", "num_layers", "num_groups", "window"),
    [
        (GPT_OSS, 12, 2, 128),
        (GEMMA, 10, 7, 1024),
        ("google/gemma-2-9b-it", 21, 2, 4096),
        ("allenai/Olmo-3-1025-7B", 8, 4, 4096),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 12, 4, 8192),
    ],
)
def test_layers_of_published_models(name: str, num_layers: int, num_groups: int, window: int) -> None:
    groups, layers = groups_of(name), model(name).layers
    assert (groups.num_layers, groups.num_groups, groups.window) == (num_layers, num_groups, window)
    assert len(set(groups.places)) == len(layers)
    assert all(place.number < num_layers and place.group < num_groups for place in groups.places)
    is_whole = [layer.window is None and layer.chunk is None for layer in layers]
    assert [place.group == 0 for place in groups.places] == is_whole


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("microsoft/phi-4", "no layers"),
        ("microsoft/Phi-4-mini-instruct", "all of its layers"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "no layers"),
    ],
)
def test_models_whose_layers_share_one_page_table_give_the_reason(name: str, why: str) -> None:
    assert why in str(LayerGroups.of(model(name)))
    with pytest.raises(ValueError, match=rf'windowed_kv is "on", but {why}.*leave one of them out'):
        layer_groups(EngineConfig(windowed_kv="on"), model(name), 4096)


def test_pages_of_a_request() -> None:
    """8,192 tokens in pages of 16: 512 of the layers without a window, and 65 or 66 for each other group."""
    groups = groups_of(GEMMA)
    assert groups.pages_for(8192, 16) == 512 + 6 * 65
    assert groups.pages_for(512, 16) == 32 * 7, "all that it has is in the window"
    assert groups.pages_for(8192, 16, num_planned=2048) == 512 + 6 * (64 + 128)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"host_kv_gib": 1.0, "kv_tier": KVTier("files")}, "kv_tier"),
        ({"speculation": Speculation(method="draft_model", model="demo")}, "draft model"),
    ],
)
def test_a_setting_that_needs_one_page_table_wins_unless_windows_are_asked_for(
    settings: dict[str, Any], why: str
) -> None:
    assert why in str(layer_groups(EngineConfig(**settings), model(GEMMA), 8192))
    with pytest.raises(ValueError, match=rf'windowed_kv is "on", but .*{why}'):
        layer_groups(EngineConfig(**settings, windowed_kv="on"), model(GEMMA), 8192)


def test_auto_needs_requests_that_leave_their_window() -> None:
    gemma = model(GEMMA)
    assert isinstance(layer_groups(EngineConfig(), gemma, 2048), LayerGroups)
    assert "2047 tokens, is shorter than 2 windows of 1024" in str(layer_groups(EngineConfig(), gemma, 2047))
    assert isinstance(layer_groups(EngineConfig(windowed_kv="on"), gemma, 100), LayerGroups)
    assert "off" in str(layer_groups(EngineConfig(windowed_kv="off"), gemma, 8192))
