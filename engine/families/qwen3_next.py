"""Qwen3-Next (Qwen 2025): three of four layers are gated delta nets; the others attend, rotate a part of each head
and gate their outputs. All MLPs are experts, with one that all tokens share and that has a gate.
"""

from __future__ import annotations

from dataclasses import replace

from engine.base.errors import ModelLoadError
from engine.model_parts.config_keys import layered
from engine.model_parts.experts_config import ExpertsConfig
from engine.model_parts.family import QWEN_MTP, DeltaNetNames, ExpertNames, Family, WeightNames
from engine.model_parts.parts import DeltaNetConfig, LayerKind, ModelParts
from engine.model_parts.reading import Raw, read_attention, read_mlp, read_norms, read_qwen_experts, read_rope


def read_hybrid(raw: Raw) -> ModelParts:
    """Read a model of gated delta nets and attention, with experts or without. Raises ModelLoadError."""
    raw = layered(raw, {"intermediate_size": raw.get("moe_intermediate_size")})
    attention = read_attention(raw, head_dim=256, qk_norm="heads")
    attention = replace(attention, has_output_gate=bool(raw.get("attn_output_gate", True)))
    full, recurrent = LayerKind(read_rope(raw, attention, is_partial=True)), LayerKind(None, is_recurrent=True)
    kinds = {"full_attention": full, "linear_attention": recurrent}
    count, step = int(raw["num_hidden_layers"]), int(raw.get("full_attention_interval") or 4)
    named = raw.get("layer_types") or [
        "linear_attention" if (layer + 1) % step else "full_attention" for layer in range(count)
    ]
    if len(named) != count or not {"full_attention"} <= set(named) <= set(kinds):
        raise ModelLoadError(
            f"layer_types names {len(named)} layers of the kinds {', '.join(sorted(set(named)))}; expected "
            f"{count} of the kinds {', '.join(kinds)}, and at least one of the first"
        )
    experts = _read_experts(raw)
    return ModelParts(
        attention,
        tuple(kinds[name] for name in named),
        read_mlp(raw),
        replace(read_norms(raw), added=1.0),
        experts,
        delta_net=_read_delta_net(raw),
    )


def _read_experts(raw: Raw) -> ExpertsConfig | None:
    if "num_experts" not in raw:
        return None
    experts = read_qwen_experts(raw, renormalizes=True)
    if experts is None:
        return None
    return replace(experts, shared_size=int(raw["shared_expert_intermediate_size"]), shared_is_gated=True)


def _read_delta_net(raw: Raw) -> DeltaNetConfig:
    keys, values = int(raw["linear_num_key_heads"]), int(raw["linear_num_value_heads"])
    if values % keys:
        raise ModelLoadError(f"linear_num_value_heads {values} cannot share {keys} key heads evenly")
    dims = int(raw["linear_key_head_dim"]), int(raw["linear_value_head_dim"])
    kernel = int(raw.get("linear_conv_kernel_dim", 4))
    if kernel < 2:
        raise ModelLoadError(f"linear_conv_kernel_dim is {kernel}, expected at least 2")
    return DeltaNetConfig(keys, values, *dims, kernel)


HIDDEN_ACT = {"hidden_act": "silu"}
"""The activation of MLPs and of the recurrent layers' convolutions."""
SHARED_EXPERT = ExpertNames(shared="shared_expert")
FAMILY = Family(
    ("Qwen3NextForCausalLM",),
    read_hybrid,
    WeightNames(
        experts=SHARED_EXPERT,
        delta_net=DeltaNetNames(("in_proj_qkvz",), ("in_proj_ba",)),
        left_out=("mtp.",),
        mtp=QWEN_MTP,
    ),
    {"partial_rotary_factor": 0.25},
    HIDDEN_ACT,
)
