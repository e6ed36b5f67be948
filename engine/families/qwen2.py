"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases of queries, keys and values."""

from __future__ import annotations

from engine.model_parts.family import Family
from engine.model_parts.parts import ModelParts
from engine.model_parts.reading import (
    Raw,
    read_attention,
    read_mlp,
    read_norms,
    read_rope,
    switched_windows,
    windowed,
)


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw, qkv_bias=True, output_bias=False)
    return ModelParts(
        attention,
        windowed(read_rope(raw, attention), switched_windows(raw, 4096)),
        read_mlp(raw),
        read_norms(raw),
    )


FAMILY = Family(("Qwen2ForCausalLM",), _read)
