"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama with a window in all layers, or in none."""

from __future__ import annotations

from engine.models.family import Family
from engine.models.parts import ModelParts, NormConfig
from engine.models.reading import Raw, alike, read_attention, read_mlp


def _read(raw: Raw) -> ModelParts:
    return ModelParts(
        read_attention(raw, num_kv_heads=8, qkv_bias=False, output_bias=False),
        alike(raw, raw.get("sliding_window", 4096)),
        read_mlp(raw),
        NormConfig(float(raw.get("rms_norm_eps", 1e-6))),
    )


FAMILY = Family(("MistralForCausalLM",), _read)
