"""GLM-4.5 to 4.7 (GLM team 2025, arXiv:2508.06471): a part of each head is rotated; sigmoids choose experts."""

from __future__ import annotations

from engine.model_parts.experts_config import ExpertsConfig
from engine.model_parts.family import Family, MTPNames, WeightNames
from engine.model_parts.parts import ModelParts
from engine.model_parts.reading import Raw, alike, read_attention, read_mlp, read_norms, read_rope


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw, output_bias=False, qk_norm="heads" if raw.get("use_qk_norm") else "none")
    return ModelParts(
        attention,
        alike(read_rope(raw, attention, is_partial=True), raw),
        read_mlp(raw),
        read_norms(raw, 1e-5),
        ExpertsConfig.from_sigmoid(raw, size="moe_intermediate_size"),
    )


# The layers after the last predict further tokens: the first is loaded for MTP (`engine/loading/load_mtp.py`).
FAMILY = Family(
    ("Glm4MoeForCausalLM",),
    _read,
    WeightNames(left_out=("model.layers.{layers}.",), mtp=MTPNames()),
    {"partial_rotary_factor": 0.5, "n_shared_experts": 1, "first_k_dense_replace": 1},
)
