"""Seed-OSS (ByteDance 2025): Llama with biases of queries, keys and values."""

from __future__ import annotations

from engine.model_parts.family import Family
from engine.model_parts.parts import ModelParts
from engine.model_parts.reading import Raw, alike, read_attention, read_mlp, read_norms, read_rope


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(
        raw,
        head_dim=128,
        qkv_bias=bool(raw.get("attention_bias", True)),
        output_bias=bool(raw.get("attention_out_bias", False)),
    )
    return ModelParts(
        attention,
        alike(read_rope(raw, attention), raw),
        read_mlp(raw, bias=bool(raw.get("mlp_bias", False))),
        read_norms(raw),
    )


FAMILY = Family(("SeedOssForCausalLM",), _read)
