"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts in all layers."""

from __future__ import annotations

from engine.model_parts.experts_config import ExpertsConfig
from engine.model_parts.family import ExpertNames, Family, WeightNames
from engine.model_parts.parts import ModelParts
from engine.model_parts.reading import Raw, alike, read_attention, read_mlp, read_norms, read_rope


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw, num_kv_heads=8, qkv_bias=False, output_bias=False)
    return ModelParts(
        attention,
        alike(read_rope(raw, attention, 1000000.0), raw, raw.get("sliding_window")),
        read_mlp(raw),
        read_norms(raw, 1e-5),
        ExpertsConfig.from_config(raw),
    )


_NAMES = WeightNames(experts=ExpertNames("block_sparse_moe", "gate", "w1", "w3", "w2"))
FAMILY = Family(("MixtralForCausalLM",), _read, _NAMES, fixed={"norm_topk_prob": True})
