"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024, arXiv:2404.14219, arXiv:2412.08905): fused projections."""

from __future__ import annotations

from engine.model_parts.family import Family, WeightNames
from engine.model_parts.parts import AttentionConfig, ModelParts
from engine.model_parts.reading import Raw, alike, read_attention, read_mlp, read_norms
from engine.model_parts.rope import RopeConfig


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw, qkv_bias=False, output_bias=False)
    layers = alike(_read_rope(raw, attention), raw, raw.get("sliding_window"))
    return ModelParts(attention, layers, read_mlp(raw), read_norms(raw, 1e-5))


def _read_rope(raw: Raw, attention: AttentionConfig) -> RopeConfig:
    """Read the rotation. The original context has its own key, which precedes the one in the settings."""
    original = int(raw.get("original_max_position_embeddings", 4096))
    return RopeConfig.from_config(raw, attention.turned_dim, is_partial=True, original=original)


FAMILY = Family(
    ("Phi3ForCausalLM",),
    _read,
    WeightNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    fixed={"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
)
