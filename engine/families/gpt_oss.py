"""gpt-oss (OpenAI 2025, arXiv:2508.10925): attention sinks, windows in every other layer, clamped experts."""

from __future__ import annotations

from dataclasses import replace

from engine.model_parts.experts_config import Clamp, ExpertsConfig
from engine.model_parts.family import ExpertNames, Family, WeightNames
from engine.model_parts.parts import ModelParts
from engine.model_parts.reading import (
    Raw,
    every,
    listed_windows,
    read_attention,
    read_mlp,
    read_norms,
    read_rope,
    windowed,
    with_rope,
)

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(raw: Raw) -> ModelParts:
    attention = replace(read_attention(raw, head_dim=64), has_sinks=True)
    windows = listed_windows(raw, raw["sliding_window"], raw.get("layer_types") or every(2, raw))
    experts = ExpertsConfig.from_config(raw)
    assert experts is not None
    clamp = Clamp(float(raw.get("swiglu_alpha", 1.702)), float(raw.get("swiglu_limit", 7.0)))
    is_mxfp4 = (raw.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    return ModelParts(
        attention,
        windowed(read_rope(with_rope(raw, _ROPE), attention, 150000.0), windows),
        read_mlp(raw),
        read_norms(raw, 1e-5),
        replace(experts, router_bias=True, clamp=clamp, is_mxfp4=is_mxfp4, are_quantized=is_mxfp4),
    )


FAMILY = Family(
    ("GptOssForCausalLM",),
    _read,
    WeightNames(experts=ExpertNames(router="router", are_stacked=True)),
    {"attention_bias": True, "sliding_window": 128, "torch_dtype": "bfloat16"},
    {"norm_topk_prob": True},
)
