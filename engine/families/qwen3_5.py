"""Qwen3.5 and 3.6 (Qwen 2026): Qwen3-Next's layers, with MLPs or experts, in a model with vision, which is not
loaded.
"""

from __future__ import annotations

from dataclasses import replace

from engine.families.qwen3_next import HIDDEN_ACT, SHARED_EXPERT, read_hybrid
from engine.model_parts.family import QWEN_MTP, DeltaNetNames, Family, WeightNames

FAMILY = Family(
    (
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    read_hybrid,
    WeightNames(
        experts=replace(SHARED_EXPERT, may_be_stacked=True),
        delta_net=DeltaNetNames(("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")),
        left_out=("mtp.", "model.visual.", "visual."),
        mtp=QWEN_MTP,
    ),
    {"partial_rotary_factor": 0.25},
    {**HIDDEN_ACT, "norm_topk_prob": True, "decoder_sparse_step": 1},
)
