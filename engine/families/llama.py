"""Llama 2 to 3.x (Touvron et al. 2023, arXiv:2307.09288), from which the other families differ."""

from __future__ import annotations

from engine.model_parts.family import Family
from engine.model_parts.parts import ModelParts
from engine.model_parts.reading import Raw, alike, read_attention, read_mlp, read_norms, read_rope


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw)
    return ModelParts(
        attention,
        alike(read_rope(raw, attention), raw),
        read_mlp(raw, bias=bool(raw.get("mlp_bias", False))),
        read_norms(raw),
    )


FAMILY = Family(("LlamaForCausalLM",), _read)
