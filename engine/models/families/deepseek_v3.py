"""DeepSeek-V3 and R1 (DeepSeek 2024, arXiv:2412.19437), Kimi-K2 (Moonshot 2025, arXiv:2507.20534): latent
attention, and experts that sigmoids choose.
"""

from __future__ import annotations

from engine.models.errors import ModelLoadError
from engine.models.experts_config import ExpertsConfig
from engine.models.family import Family, WeightNames
from engine.models.parts import ModelParts
from engine.models.reading import Raw, alike, read_latent_attention, read_mlp, read_norms, read_rope

_ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""Keys that earlier models of DeepSeek have with other values."""


def _read(raw: Raw) -> ModelParts:
    for key, expected in _ONLY.items():
        if raw.get(key, expected) != expected:
            raise ModelLoadError(f"{key} is {raw[key]!r}, which is not supported: expected {expected!r}")
    attention = read_latent_attention(raw)
    return ModelParts(
        attention,
        alike(read_rope(raw, attention), raw),
        read_mlp(raw),
        read_norms(raw),
        ExpertsConfig.from_sigmoid(raw),
    )


# The layers after the last predict more tokens at once, which Raydix does not use.
FAMILY = Family(("DeepseekV3ForCausalLM",), _read, WeightNames(left_out=("model.layers.{layers}.",)))
