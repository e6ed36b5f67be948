"""Mistral-Small 3.1 to 3.2 and Ministral 3 (Mistral 2025): Mistral inside a model with vision, which is not
loaded. Ministral 3 multiplies queries at later positions.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model_parts.family import Family, WeightNames
from engine.model_parts.parts import LaterScale, ModelParts
from engine.model_parts.reading import Raw, alike, read_attention, read_mlp, read_norms, read_rope, with_rope
from engine.model_parts.rope import rope_settings

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Defaults of a Ministral 3."""


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw, num_kv_heads=8, head_dim=128, qkv_bias=False, output_bias=False)
    if raw.get("model_type") == "ministral3":
        raw = with_rope(raw, _ROPE)
    rope = rope_settings(raw)
    if beta := rope.get("llama_4_scaling_beta"):
        scale = LaterScale(float(beta), int(rope["original_max_position_embeddings"]))
        attention = replace(attention, later_scale=scale)
    layers = alike(read_rope(raw, attention), raw, raw.get("sliding_window"))
    return ModelParts(attention, layers, read_mlp(raw), read_norms(raw, 1e-5))


_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
FAMILY = Family(
    ("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"), _read, WeightNames(left_out=_VISION)
)
