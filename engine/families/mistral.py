"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama with a window in all layers, or in none."""

from __future__ import annotations

from engine.model_parts.family import Family
from engine.model_parts.parts import ModelParts
from engine.model_parts.reading import Raw, alike, read_attention, read_mlp, read_norms, read_rope


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw, num_kv_heads=8, qkv_bias=False, output_bias=False)
    return ModelParts(
        attention,
        alike(read_rope(raw, attention), raw, raw.get("sliding_window", 4096)),
        read_mlp(raw),
        read_norms(raw),
    )


FAMILY = Family(("MistralForCausalLM",), _read)
