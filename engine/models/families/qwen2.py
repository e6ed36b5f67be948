"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases of queries, keys and values."""

from __future__ import annotations

from engine.models.family import Family
from engine.models.parts import ModelParts, NormConfig
from engine.models.reading import Raw, read_attention, read_mlp, switched_windows, windowed


def _read(raw: Raw) -> ModelParts:
    return ModelParts(
        read_attention(raw, qkv_bias=True, output_bias=False),
        windowed(raw, switched_windows(raw, 4096)),
        read_mlp(raw),
        NormConfig(float(raw.get("rms_norm_eps", 1e-6))),
    )


FAMILY = Family(("Qwen2ForCausalLM",), _read)
