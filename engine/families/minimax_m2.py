"""MiniMax-M2 (MiniMax 2025): norms of all heads together, partial rotation; experts in all layers."""

from __future__ import annotations

from engine.base.errors import ModelLoadError
from engine.model_parts.config_keys import layered
from engine.model_parts.experts_config import ExpertsConfig
from engine.model_parts.family import ExpertNames, Family, WeightNames
from engine.model_parts.parts import ModelParts
from engine.model_parts.reading import Raw, alike, read_attention, read_mlp, read_norms, read_rope


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw, qkv_bias=False, output_bias=False, qk_norm="full")
    if kinds := set(raw.get("attn_type_list") or ()) - {1}:
        raise ModelLoadError(
            f"attn_type_list has {kinds.pop()!r}, which is not supported: expected 1 for all layers"
        )
    for key in ("mlp_intermediate_size", "shared_moe_mode"):
        raw.get(key)  # for MLPs, which the model does not have
    if "rotary_dim" in raw:  # the key of published files
        raw = layered(raw, {"partial_rotary_factor": raw["rotary_dim"] / attention.head_dim})
    return ModelParts(
        attention,
        alike(read_rope(raw, attention, 5000000.0, is_partial=True), raw),
        read_mlp(raw),
        read_norms(raw),
        ExpertsConfig.from_sigmoid(raw, counted=("num_local_experts", "num_experts"), size="intermediate_size"),
    )


_EXPERTS = ExpertNames("block_sparse_moe", "gate", "w1", "w3", "w2", correction="e_score_correction_bias")
FAMILY = Family(
    ("MiniMaxM2ForCausalLM",),
    _read,
    WeightNames(experts=_EXPERTS),
    fixed={
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "first_k_dense_replace": 0,
        "n_shared_experts": 0,
        "shared_intermediate_size": 0,
        "swa_rope_theta": -1.0,
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
    },
)
