"""What a checkpoint holds without use is listed at the start, and refused where its meaning is not certain."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.loading.load_model import load_model
from engine.models.any_model import model_facts
from engine.models.config import ModelConfig
from engine.models.errors import ModelLoadError
from tests.engine.support.encoders import ENCODER_FAMILIES, save_encoder
from tests.engine.support.oracle import FAMILIES, MORE_FAMILIES, save_tiny
from tests.engine.support.published_models import PUBLISHED, PUBLISHED_QUANTIZED
from tests.engine.support.steps_by_hand import load_runner


def edit(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_all_that_transformers_saves_is_known(tmp_path: Path) -> None:
    for family in FAMILIES | MORE_FAMILIES:
        assert ModelConfig.from_directory(save_tiny(family, tmp_path)).unused_keys.uncertain == (), family
    for family in ENCODER_FAMILIES:
        assert model_facts(save_encoder(family, tmp_path / family)).unused_keys.uncertain == (), family


@pytest.mark.parametrize("name", [*PUBLISHED, *PUBLISHED_QUANTIZED])
def test_all_that_published_models_say_is_known(name: str) -> None:
    raw = PUBLISHED_QUANTIZED.get(name) or PUBLISHED[name]
    assert ModelConfig.from_json(raw, {}, name).unused_keys.uncertain == ()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"swa_gate": True}, "swa_gate"),
        ({"sliding_window": 64}, "sliding_window"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters.factor",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"full_attention": {"rope_type": "yarn"}}},
            "rope_scaling.full_attention",
        ),
        ({"quantization_config": {"quant_method": "fp8", "hadamard": 128}}, "quantization_config.hadamard"),
        ({"text_config": {"embedding_multiplier": 12.0}}, "embedding_multiplier"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_key_that_could_change_what_is_computed_is_refused(
    changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    model = save_tiny("llama2", tmp_path)
    edit(model, **changes)
    with pytest.raises(ModelLoadError, match=rf"config.json has {key}, .* engine.ignored_config_keys: \[{key}\]"):
        load_runner(model)


def test_a_key_that_the_operator_knows_is_left_out(tmp_path: Path) -> None:
    model = save_tiny("llama2", tmp_path)
    edit(model, swa_gate=True, rotations=3)
    with pytest.raises(ModelLoadError, match=r"config.json has rotations, which"):
        load_runner(model, ignored_config_keys=["swa_gate"])
    load_runner(model, ignored_config_keys=["swa_gate", "rotations"])


def test_keys_that_say_nothing_are_no_fault(tmp_path: Path) -> None:
    model = save_tiny("llama2", tmp_path)
    nothing: dict[str, Any] = {"swa_gate": None, "use_swa_gate": False, "gates": [], "gate": {}, "gate_type": ""}
    edit(model, **nothing, unsloth_version="2026.1", mlp_dropout=0.1, router_aux_loss_coef=0.2, mask_token_id=7)
    load_runner(model)


def test_what_is_not_used_is_listed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = save_tiny("llama2", tmp_path)
    edit(model, unsloth_version="2026.1", swa_gate=None)
    tensors = load_file(model / "model.safetensors")
    scales = {f"model.layers.{layer}.self_attn.k_scale": torch.ones(1) for layer in range(3)}
    save_file({**tensors, **scales}, model / "model.safetensors")
    for name in ("README.md", "preprocessor_config.json"):
        (model / name).write_text("{}")
    (model / "onnx").mkdir()
    caplog.set_level(logging.INFO)
    load_model(EngineConfig(model=str(model), device="cpu", kv_pages=8))
    [said] = [record for record in caplog.records if "not used of" in record.message]
    assert said.levelname == "INFO"
    for part in (
        "unsloth_version",
        "swa_gate",
        "tensors: model.layers.*.self_attn.k_scale (3)",
        "files: README.md, onnx/, preprocessor_config.json",
    ):
        assert part in said.message


def _adapter(model: Path) -> str:
    (model / "adapter_model.safetensors").touch()
    return "files: adapter_model.safetensors"


def _stop_strings(model: Path) -> str:
    stated = {"top_p": 0.9, "stop_strings": ["###"], "num_beams": None}
    (model / "generation_config.json").write_text(json.dumps(stated))
    return "keys of generation_config.json: stop_strings"


@pytest.mark.parametrize("add", [_adapter, _stop_strings])
def test_what_answers_may_depend_on_is_a_warning(
    add: Callable[[Path], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_tiny("llama2", tmp_path)
    expected = add(model)
    load_runner(model)
    [said] = [record for record in caplog.records if "not used of" in record.message]
    assert said.levelname == "WARNING" and expected in said.message
