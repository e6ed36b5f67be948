"""SmolLM3 (Hugging Face 2025): Llama in which positions do not rotate queries and keys of every fourth layer
(NoPE, Kazemnejad et al. 2023, arXiv:2305.19466).
"""

from __future__ import annotations

from engine.model_parts.family import Family
from engine.model_parts.parts import LayerKind, ModelParts
from engine.model_parts.reading import (
    Raw,
    listed_windows,
    read_attention,
    read_mlp,
    read_norms,
    read_rope,
    turned_layers,
)
from engine.model_parts.rope import RopeConfig


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw, num_kv_heads=4)
    return ModelParts(
        attention,
        _layers(raw, read_rope(raw, attention, 2000000.0)),
        read_mlp(raw, bias=bool(raw.get("mlp_bias", False))),
        read_norms(raw),
    )


def _layers(raw: Raw, rope: RopeConfig) -> tuple[LayerKind, ...]:
    turned = turned_layers(raw)
    window = raw.get("sliding_window")
    window = window if raw.get("use_sliding_window", False) else None
    kinds = raw.get("layer_types") or [
        "full_attention" if is_turned else "sliding_attention" for is_turned in turned
    ]
    windows = listed_windows(raw, window, kinds[: len(turned)])
    return tuple(
        LayerKind(rope if is_turned else None, width) for is_turned, width in zip(turned, windows, strict=True)
    )


FAMILY = Family(("SmolLM3ForCausalLM",), _read, defaults={"tie_word_embeddings": True})
