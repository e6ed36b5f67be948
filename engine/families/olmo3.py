"""OLMo 3 (OLMo team 2025): OLMo 2 with windows in three of four layers, whose rotation is never stretched."""

from __future__ import annotations

from engine.model_parts.family import Family
from engine.model_parts.parts import LayerKind, ModelParts
from engine.model_parts.reading import Raw, every, listed_windows, read_attention, read_mlp, read_norms, read_ropes


def _read(raw: Raw) -> ModelParts:
    attention = read_attention(raw, qk_norm="full")
    theta = float(raw.get("rope_theta", 500000.0))
    full, sliding = read_ropes(raw, attention, theta, theta)
    windows = listed_windows(raw, raw.get("sliding_window", 4096), raw.get("layer_types") or every(4, raw))
    layers = tuple(LayerKind(full if window is None else sliding, window) for window in windows)
    return ModelParts(attention, layers, read_mlp(raw), read_norms(raw, 1e-5, before=False, after=True))


FAMILY = Family(("Olmo3ForCausalLM",), _read)
