"""OLMo 2 (OLMo team 2024, arXiv:2501.00656): norms after attention and MLP, and of all query and key heads."""

from __future__ import annotations

from engine.model_parts.family import Family, WeightNames
from engine.model_parts.parts import ModelParts
from engine.model_parts.reading import Raw, alike, read_attention, read_mlp, read_norms, read_rope


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw, qk_norm="full")
    layers = alike(read_rope(raw, attention), raw)
    return ModelParts(attention, layers, read_mlp(raw), read_norms(raw, 1e-5, before=False, after=True))


FAMILY = Family(
    ("Olmo2ForCausalLM",),
    _read,
    WeightNames(attended_norm="post_attention_layernorm", mlp_output_norm="post_feedforward_layernorm"),
)
