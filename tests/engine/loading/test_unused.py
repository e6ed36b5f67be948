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

from engine.base.errors import ModelLoadError
from engine.loading.load_model import load_model
from engine.model_config.any_model import model_facts
from engine.model_config.config import ModelConfig
from engine.settings.config import EngineConfig
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
def test_all_keys_of_published_models_are_known(name: str) -> None:
    raw = PUBLISHED_QUANTIZED.get(name) or PUBLISHED[name]
    assert ModelConfig.from_json(raw, {}, name).unused_keys.uncertain == ()


FURTHER_KEYS: dict[str, dict[str, Any]] = {
    "openai/gpt-oss-20b": {
        "experts_per_token": 4,
        "initial_context_length": 4096,
        "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.9,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    },
    "MiniMaxAI/MiniMax-M2": {
        "attn_type_list": [1] * 62,
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
        "mlp_intermediate_size": 8192,
        "mtp_transformer_layers": 1,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
        "swa_rope_theta": -1.0,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    },
    "microsoft/Phi-4-mini-instruct": {
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "HuggingFaceTB/SmolLM3-3B": {
        "is_llama_config": True,
        "max_window_layers": 28,
        "pretraining_tp": 2,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "deepseek-ai/DeepSeek-V3-0324": {"aux_loss_alpha": 0.001, "ep_size": 1, "seq_aux": True, "qk_head_dim": 192},
    "google/gemma-2-9b-it": {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"},
    "google/gemma-3-27b-it": {"mm_tokens_per_image": 256, "boi_token_index": 255999, "image_token_index": 262144},
    "Qwen/Qwen3.5-27B": {"image_token_id": 248056, "vision_start_token_id": 248053, "mtp_num_hidden_layers": 1},
}
"""What published files say besides, which changes nothing."""


@pytest.mark.parametrize("name", FURTHER_KEYS)
def test_keys_without_effect_in_published_models_are_known(name: str) -> None:
    config = ModelConfig.from_json({**PUBLISHED[name], **FURTHER_KEYS[name]}, {}, name)
    assert config.unused_keys.uncertain == ()


def test_another_kind_of_attention_in_a_list_is_refused() -> None:
    raw = {**PUBLISHED["MiniMaxAI/MiniMax-M2"], "attn_type_list": [0] * 62}
    with pytest.raises(ModelLoadError, match="attn_type_list has 0"):
        ModelConfig.from_json(raw, {}, "config.json")


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
def test_a_key_that_could_change_the_computation_is_refused(
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


def test_keys_that_are_empty_or_without_effect_are_accepted(tmp_path: Path) -> None:
    model = save_tiny("llama2", tmp_path)
    nothing: dict[str, Any] = {"swa_gate": None, "use_swa_gate": False, "gates": [], "gate": {}, "gate_type": ""}
    edit(model, **nothing, unsloth_version="2026.1", mlp_dropout=0.1, router_aux_loss_coef=0.2, mask_token_id=7)
    load_runner(model)


def test_unused_keys_and_weights_are_listed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
def test_an_unused_key_that_answers_may_depend_on_is_a_warning(
    add: Callable[[Path], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_tiny("llama2", tmp_path)
    expected = add(model)
    load_runner(model)
    [said] = [record for record in caplog.records if "not used of" in record.message]
    assert said.levelname == "WARNING" and expected in said.message
