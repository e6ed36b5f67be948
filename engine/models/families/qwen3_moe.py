"""Qwen3-MoE (Yang et al. 2025, arXiv:2505.09388): Qwen3 with experts in all layers or some of them."""

from __future__ import annotations

from engine.models.experts_config import ExpertsConfig
from engine.models.family import Family
from engine.models.parts import ModelParts, NormConfig
from engine.models.reading import Raw, alike, read_attention, read_mlp


def _read(raw: Raw) -> ModelParts:
    return ModelParts(
        read_attention(raw, num_kv_heads=4, qk_norm="heads"),
        alike(raw, raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None),
        read_mlp(raw),
        NormConfig(float(raw.get("rms_norm_eps", 1e-6))),
        ExpertsConfig.from_config(raw, renormalizes=False),
    )


FAMILY = Family(("Qwen3MoeForCausalLM",), _read)
