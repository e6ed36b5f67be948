"""Gemma 2 (Gemma team 2024, arXiv:2408.00118): norms before and after, soft caps, windows in every other layer."""

from __future__ import annotations

from dataclasses import replace

from engine.base.errors import ModelLoadError
from engine.model_parts.family import Family, WeightNames
from engine.model_parts.parts import ModelParts, Scales
from engine.model_parts.reading import (
    Raw,
    every,
    listed_windows,
    read_attention,
    read_mlp,
    read_norms,
    read_rope,
    windowed,
)


def _read(raw: Raw) -> ModelParts:
    if raw.get("use_bidirectional_attention"):
        raise ModelLoadError("use_bidirectional_attention is not supported: expected attention to earlier tokens")
    attention = read_attention(
        raw, num_kv_heads=4, head_dim=256, scale=float(raw["query_pre_attn_scalar"]) ** -0.5
    )
    windows = listed_windows(raw, raw.get("sliding_window", 4096), raw.get("layer_types") or every(2, raw))
    return ModelParts(
        replace(attention, soft_cap=raw["attn_logit_softcapping"]),
        windowed(read_rope(raw, attention), windows),
        read_mlp(raw, activation="hidden_activation"),
        replace(read_norms(raw, after=True), added=1.0),
        scales=Scales(embedding=raw["hidden_size"] ** 0.5, logits_cap=raw["final_logit_softcapping"]),
    )


FAMILY = Family(
    ("Gemma2ForCausalLM",),
    _read,
    WeightNames(mlp_norm="pre_feedforward_layernorm"),
    {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
)
