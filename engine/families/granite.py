"""Granite 3 (IBM 2024): Llama with constant factors of embeddings, residuals, scores and logits."""

from __future__ import annotations

from engine.model_parts.family import Family
from engine.model_parts.parts import ModelParts, Scales
from engine.model_parts.reading import Raw, alike, read_attention, read_mlp, read_norms, read_rope


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw, scale=float(raw.get("attention_multiplier", 1.0)))
    return ModelParts(
        attention,
        alike(read_rope(raw, attention), raw),
        read_mlp(raw, bias=bool(raw.get("mlp_bias", False))),
        read_norms(raw),
        scales=Scales(
            embedding=float(raw.get("embedding_multiplier", 1.0)),
            residual=float(raw.get("residual_multiplier", 1.0)),
            logits=1 / float(raw.get("logits_scaling", 1.0)),
        ),
    )


FAMILY = Family(("GraniteForCausalLM",), _read)
