"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024, arXiv:2404.14219, arXiv:2412.08905): fused projections."""

from __future__ import annotations

from engine.models.family import Family, WeightNames
from engine.models.parts import ModelParts
from engine.models.reading import Raw, alike, read_attention, read_mlp, read_norms, read_rope


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw, qkv_bias=False, output_bias=False)
    layers = alike(read_rope(raw, attention), raw, raw.get("sliding_window"))
    return ModelParts(attention, layers, read_mlp(raw), read_norms(raw, 1e-5))


FAMILY = Family(("Phi3ForCausalLM",), _read, WeightNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)))
