"""DeepSeek-V3 and R1 (DeepSeek 2024, arXiv:2412.19437), Kimi-K2 (Moonshot 2025, arXiv:2507.20534): latent
attention, and experts that sigmoids choose.
"""

from __future__ import annotations

from engine.model_parts.experts_config import ExpertsConfig
from engine.model_parts.family import Family, MTPNames, WeightNames
from engine.model_parts.parts import ModelParts
from engine.model_parts.reading import Raw, alike, read_latent_attention, read_mlp, read_norms, read_rope


def _read(raw: Raw) -> ModelParts:
    raw.get("head_dim")  # transformers saves the size of the rotated part, which another key has
    attention = read_latent_attention(raw)
    return ModelParts(
        attention,
        alike(read_rope(raw, attention), raw),
        read_mlp(raw),
        read_norms(raw),
        ExpertsConfig.from_sigmoid(raw, size="moe_intermediate_size"),
    )


# The layers after the last predict further tokens: the first is loaded for MTP (`engine/loading/load_mtp.py`).
FAMILY = Family(
    ("DeepseekV3ForCausalLM",),
    _read,
    WeightNames(left_out=("model.layers.{layers}.",), mtp=MTPNames()),
    {
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
    },
    # Earlier DeepSeek models have other values of these keys.
    {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
)
