"""Qwen3 (Yang et al. 2025, arXiv:2505.09388): every query and key head is normed before rotation."""

from __future__ import annotations

from engine.models.family import Family
from engine.models.parts import ModelParts, NormConfig
from engine.models.reading import Raw, read_attention, read_mlp, switched_windows, windowed


def _read(raw: Raw) -> ModelParts:
    return ModelParts(
        read_attention(raw, head_dim=128, qk_norm="heads"),
        windowed(raw, switched_windows(raw, 4096)),
        read_mlp(raw),
        NormConfig(float(raw.get("rms_norm_eps", 1e-6))),
    )


FAMILY = Family(("Qwen3ForCausalLM",), _read)
