"""Ministral (Mistral 2024), as in transformers' class: Mistral in which each layer has a window or none."""

from __future__ import annotations

from engine.model_parts.family import Family
from engine.model_parts.parts import ModelParts
from engine.model_parts.reading import (
    Raw,
    listed_windows,
    read_attention,
    read_mlp,
    read_norms,
    read_rope,
    windowed,
)


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw, num_kv_heads=8, qkv_bias=False, output_bias=False)
    window = raw.get("sliding_window", 4096)
    usual = "full_attention" if window is None else "sliding_attention"
    kinds = raw.get("layer_types") or [usual] * int(raw["num_hidden_layers"])
    return ModelParts(
        attention,
        windowed(read_rope(raw, attention), listed_windows(raw, window, kinds)),
        read_mlp(raw),
        read_norms(raw),
    )


FAMILY = Family(("MinistralForCausalLM",), _read)
