"""Qwen3-MoE (Yang et al. 2025, arXiv:2505.09388): Qwen3 with experts in all layers or some of them."""

from __future__ import annotations

from engine.model_parts.family import Family
from engine.model_parts.parts import ModelParts
from engine.model_parts.reading import (
    Raw,
    alike,
    read_attention,
    read_mlp,
    read_norms,
    read_qwen_experts,
    read_rope,
)


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw, num_kv_heads=4, qk_norm="heads")
    window = raw.get("sliding_window", 4096)
    window = window if raw.get("use_sliding_window", False) else None
    return ModelParts(
        attention,
        alike(read_rope(raw, attention), raw, window),
        read_mlp(raw),
        read_norms(raw),
        read_qwen_experts(raw, renormalizes=False),
    )


FAMILY = Family(("Qwen3MoeForCausalLM",), _read)
