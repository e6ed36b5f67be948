"""Gemma 4 (Google 2026): Gemma 3 in which layers that attend to all positions have larger heads than those with a
window, and rotate the fastest quarter of their pairs. Values are normed, and in large models use the keys'
projection.

In small models the last layers attend to earlier ones' keys and values, and a second embedding of each token
enters each layer; one model has experts next to each MLP. Vision and audio are not loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.base.errors import ModelLoadError
from engine.model_parts.config_keys import layered
from engine.model_parts.experts_config import ExpertsConfig
from engine.model_parts.family import Family, WeightNames
from engine.model_parts.parts import AttentionConfig, LayerInputsConfig, LayerKind, ModelParts, Scales
from engine.model_parts.reading import Raw, check_kinds, every, read_attention, read_mlp, read_norms
from engine.model_parts.rope import RopeConfig, rope_settings

_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


def _read(raw: Raw) -> ModelParts:
    if raw.get("use_bidirectional_attention") == "all":
        raise ModelLoadError(
            "use_bidirectional_attention is 'all', which is not supported: expected attention to earlier tokens"
        )
    size, vocab = (int(raw.get(f"{name}_per_layer_input") or 0) for name in ("hidden_size", "vocab_size"))
    sliding, full = _heads(raw)
    return ModelParts(
        sliding,
        _layers(raw, {"sliding_attention": sliding, "full_attention": full}),
        read_mlp(raw, activation="hidden_activation"),
        replace(read_norms(raw, after=True), scales_layers=True),
        _read_experts(raw),
        scales=Scales(embedding=raw["hidden_size"] ** 0.5, logits_cap=raw.get("final_logit_softcapping")),
        inputs=LayerInputsConfig(size, vocab) if size else None,
    )


def _heads(raw: Raw) -> tuple[AttentionConfig, AttentionConfig]:
    """Return the heads of layers with a window, and of those without."""
    sliding = replace(read_attention(raw, qk_norm="heads", scale=1.0), norms_values=True)
    is_joint = bool(raw.get("attention_k_eq_v", False))
    full = read_attention(layered(_differing(raw, is_joint), raw), qk_norm="heads", scale=1.0)
    return sliding, replace(full, norms_values=True, projects_values=not is_joint)


def _differing(raw: Raw, is_joint: bool) -> Raw:
    """Return the values that differ in layers without a window: from separate keys, or from a list for each such
    layer, as transformers saves it. Raises ModelLoadError.
    """
    listed = list((raw.get("per_layer_config") or {}).values())
    if listed:
        if any(layer != listed[0] or not set(layer) <= {"head_dim", "num_key_value_heads"} for layer in listed):
            raise ModelLoadError(
                "this per_layer_config is not supported: expected the same head_dim and num_key_value_heads "
                "for all layers with full attention"
            )
        return dict(listed[0])
    heads = {"num_key_value_heads": raw.get("num_global_key_value_heads")}
    is_other = is_joint and heads["num_key_value_heads"]
    return {"head_dim": raw["global_head_dim"], **(heads if is_other else {})}


def _layers(raw: Raw, heads: dict[str, AttentionConfig]) -> tuple[LayerKind, ...]:
    count, shared = int(raw["num_hidden_layers"]), int(raw.get("num_kv_shared_layers") or 0)
    kinds = list(raw.get("layer_types") or every(6, raw))
    if len(kinds) != count or not 0 <= shared < count:
        raise ModelLoadError(
            f"layer_types lists {len(kinds)} layers and num_kv_shared_layers is {shared}, num_hidden_layers says "
            f"{count}"
        )
    check_kinds(kinds, *heads)
    kinds[-1] = "full_attention"
    ropes, limit = rope_settings(raw) or _ROPES, int(raw["max_position_embeddings"])
    rope = {kind: RopeConfig.from_parameters(ropes[kind], heads[kind].head_dim, limit) for kind in heads}
    mlp, layers = read_mlp(raw, activation="hidden_activation"), []
    wide = replace(mlp, intermediate_size=2 * mlp.intermediate_size) if raw.get("use_double_wide_mlp") else None
    for index, kind in enumerate(kinds):
        window = int(raw["sliding_window"]) if kind == "sliding_attention" else None
        own = heads[kind] if kind == "full_attention" else None
        layer = LayerKind(rope[kind], window, attention=own)
        if index >= count - shared:
            without = replace(heads[kind], projects_keys=False, projects_values=False)
            source = _source(kinds[: count - shared], kind)
            layer = replace(layer, attention=without, kv_of=source, mlp=wide)
        layers.append(layer)
    return tuple(layers)


def _source(kinds: Sequence[str], kind: str) -> int:
    """Return the last of these layers with this kind. Raises ModelLoadError."""
    if kind not in kinds:
        raise ModelLoadError(f"num_kv_shared_layers leaves no layer of the kind {kind} with keys of its own")
    return max(index for index, other in enumerate(kinds) if other == kind)


def _read_experts(raw: Raw) -> ExpertsConfig | None:
    if not raw.get("enable_moe_block"):
        return None
    found = ExpertsConfig.from_config(
        raw, counted=("num_experts",), used="top_k_experts", size="moe_intermediate_size"
    )
    return None if found is None else replace(found, are_next_to_mlp=True)


_SENSES = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
FAMILY = Family(
    ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    _read,
    WeightNames(
        mlp_norm="pre_feedforward_layernorm",
        left_out=tuple(f"{at}{sense}." for at in ("", "model.") for sense in _SENSES),
    ),
    {
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    {"hidden_activation": "gelu_pytorch_tanh"},
)
