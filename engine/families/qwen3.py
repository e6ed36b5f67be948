"""Qwen3 (Yang et al. 2025, arXiv:2505.09388): every query and key head is normed before rotation."""

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
    attention = read_attention(raw, head_dim=128, qk_norm="heads")
    return ModelParts(
        attention,
        windowed(read_rope(raw, attention), switched_windows(raw, 4096)),
        read_mlp(raw),
        read_norms(raw),
    )


FAMILY = Family(("Qwen3ForCausalLM",), _read)
