"""MiniMax-M2 (MiniMax 2025): norms of all heads together, which are turned in part; experts in all layers."""

from __future__ import annotations

from engine.models.experts_config import ExpertsConfig
from engine.models.family import ExpertNames, Family, WeightNames
from engine.models.parts import ModelParts
from engine.models.reading import Raw, alike, read_attention, read_mlp, read_norms, read_rope


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw, qkv_bias=False, output_bias=False, qk_norm="full")
    if "rotary_dim" in raw:  # the published way to say it
        raw = {"partial_rotary_factor": raw["rotary_dim"] / attention.head_dim, **raw}
    return ModelParts(
        attention,
        alike(read_rope(raw, attention, 5000000.0), raw),
        read_mlp(raw),
        read_norms(raw),
        ExpertsConfig.from_sigmoid({**raw, "n_routed_experts": raw["num_local_experts"]}),
    )


_EXPERTS = ExpertNames("block_sparse_moe", "gate", "w1", "w3", "w2", correction="e_score_correction_bias")
FAMILY = Family(("MiniMaxM2ForCausalLM",), _read, WeightNames(experts=_EXPERTS))
