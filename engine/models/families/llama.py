"""Llama 2 to 3.x (Touvron et al. 2023, arXiv:2307.09288), from which the other families differ."""

from __future__ import annotations

from engine.models.family import Family
from engine.models.parts import ModelParts, NormConfig
from engine.models.reading import Raw, alike, read_attention, read_mlp


def _read(raw: Raw) -> ModelParts:
    return ModelParts(
        read_attention(raw),
        alike(raw),
        read_mlp(raw, bias=bool(raw.get("mlp_bias", False))),
        NormConfig(float(raw.get("rms_norm_eps", 1e-6))),
    )


FAMILY = Family(("LlamaForCausalLM",), _read)
