"""Llama 4 (Meta 2025): attention within chunks, except in every fourth layer, where positions do not rotate
queries and keys; in most layers one expert, with scaled inputs, and one that all tokens share. Vision is not
loaded.
"""

from __future__ import annotations

from dataclasses import replace

from engine.base.errors import ModelLoadError
from engine.model_parts.config_keys import layered
from engine.model_parts.experts_config import ExpertsConfig
from engine.model_parts.family import ExpertNames, Family, WeightNames
from engine.model_parts.parts import LaterScale, LayerKind, ModelParts
from engine.model_parts.reading import (
    Raw,
    check_kinds,
    read_attention,
    read_mlp,
    read_norms,
    read_rope,
    turned_layers,
)


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw, head_dim=128, qk_norm="unit" if raw.get("use_qk_norm", True) else "none")
    if raw.get("attn_temperature_tuning", True):
        beta, period = float(raw.get("attn_scale", 0.1)), int(raw.get("floor_scale", 8192))
        attention = replace(attention, later_scale=LaterScale(beta, period, first=1, is_of_unturned=True))
    rope = replace(read_rope(raw, attention, 500000.0), is_interleaved=True)
    if rope.attention_factor != 1:
        raise ModelLoadError(
            f"rope type {rope.rope_type!r} is not supported here: expected default, linear or llama3"
        )
    turned = turned_layers(raw)
    kinds = raw.get("layer_types") or [("full_attention", "chunked_attention")[is_turned] for is_turned in turned]
    check_kinds(kinds, "chunked_attention", "full_attention")
    chunk = raw.get("attention_chunk_size", 8192)
    return ModelParts(
        attention,
        tuple(
            LayerKind(rope if is_turned else None, chunk=chunk if kind == "chunked_attention" else None)
            for is_turned, kind in zip(turned, kinds, strict=True)
        ),
        read_mlp(layered(raw, {"intermediate_size_mlp": 16384}), size="intermediate_size_mlp"),
        read_norms(raw, 1e-5),
        _experts(raw),
    )


def _experts(raw: Raw) -> ExpertsConfig | None:
    count, step = int(raw["num_hidden_layers"]), int(raw.get("interleave_moe_layer_step", 1))
    sparse = raw.get("moe_layers")
    if sparse is None:
        if step < 1:
            raise ModelLoadError(f"interleave_moe_layer_step is {step}, expected at least 1")
        sparse = range(step - 1, count, step)
    found = ExpertsConfig.from_config(
        layered(raw, {"num_experts_per_tok": 1}), sparse, renormalizes=False, counted=("num_local_experts",)
    )
    if found is None:
        return None
    return replace(found, is_sigmoid=True, scales_inputs=True, shared_size=found.intermediate_size)


_EXPERTS = ExpertNames("feed_forward", "router", shared="shared_expert", are_stacked=True, takes_turns=False)
FAMILY = Family(
    ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    _read,
    WeightNames(mlp="feed_forward", experts=_EXPERTS, left_out=("vision_model.", "multi_modal_projector.")),
)
