"""Gemma 3 (Gemma team 2025, arXiv:2503.19786): Gemma 2 with norms of queries and keys instead of soft caps, and
two rotations: one for layers with a window, five of six, and a slower one. The vision part is not loaded.
"""

from __future__ import annotations

from dataclasses import replace

from engine.base.errors import ModelLoadError
from engine.model_parts.family import Family, WeightNames
from engine.model_parts.parts import LayerKind, ModelParts, Scales
from engine.model_parts.reading import Raw, every, listed_windows, read_attention, read_mlp, read_norms, read_ropes


def _read(raw: Raw) -> ModelParts:
    if raw.get("use_bidirectional_attention"):
        raise ModelLoadError("use_bidirectional_attention is not supported: expected attention to earlier tokens")
    attention = read_attention(raw, qk_norm="heads", scale=float(raw["query_pre_attn_scalar"]) ** -0.5)
    full, sliding = read_ropes(raw, attention, raw["rope_theta"], raw["rope_local_base_freq"])
    kinds = every(raw.get("sliding_window_pattern", 6), raw)
    kinds = raw.get("layer_types") or kinds
    windows = listed_windows(raw, raw["sliding_window"], kinds)
    return ModelParts(
        attention,
        tuple(LayerKind(full if window is None else sliding, window) for window in windows),
        read_mlp(raw, activation="hidden_activation"),
        replace(read_norms(raw, after=True), added=1.0),
        scales=Scales(embedding=raw["hidden_size"] ** 0.5, logits_cap=raw.get("final_logit_softcapping")),
    )


_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
FAMILY = Family(
    ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    _read,
    WeightNames(mlp_norm="pre_feedforward_layernorm", left_out=_VISION),
    {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    },
    {"attn_logit_softcapping": None},
)
