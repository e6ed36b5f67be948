"""The supported model families: what is fixed in each, and the defaults of keys that config.json may omit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Differences of one architecture from the common decoder, and its defaults."""

    qkv_bias: bool | None = None
    """Whether q, k and v have biases; None: they and the output projection follow the key `attention_bias`."""
    qk_norm: bool = False
    """Whether every query and key head gets an RMS norm before rotation."""
    windows: str = "none"
    """Layers with a sliding window: "none"; "all"; or, if the config sets `use_sliding_window`, those "listed" in
    it or all of them ("switched")."""
    num_kv_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int | None = None
    eps: float = 1e-6
    has_experts: bool = False
    """Whether layers are mixtures of experts (`engine.models.experts_config`)."""
    renormalizes: bool = False
    """Value of a missing `norm_topk_prob`, for families with experts."""


FAMILIES: Mapping[str, ModelFamily] = {
    "LlamaForCausalLM": ModelFamily(),
    "MistralForCausalLM": ModelFamily(qkv_bias=False, windows="all", num_kv_heads=8, sliding_window=4096),
    "MixtralForCausalLM": ModelFamily(
        qkv_bias=False, windows="all", num_kv_heads=8, eps=1e-5, has_experts=True, renormalizes=True
    ),
    "Qwen2ForCausalLM": ModelFamily(qkv_bias=True, windows="listed", sliding_window=4096),
    "Qwen3ForCausalLM": ModelFamily(qk_norm=True, windows="listed", head_dim=128, sliding_window=4096),
    "Qwen3MoeForCausalLM": ModelFamily(
        qk_norm=True, windows="switched", num_kv_heads=4, sliding_window=4096, has_experts=True
    ),
}
"""Supported architectures, by their name in config.json."""


def family_of(raw: Mapping[str, Any]) -> tuple[str, ModelFamily]:
    """Return the architecture that a config.json names. Raises ModelLoadError when it is not supported."""
    named = raw.get("architectures")
    names = named if isinstance(named, list) else []
    for name in names:
        if isinstance(name, str) and name.endswith("Model"):  # saved without its output head, to embed
            name = f"{name.removesuffix('Model')}ForCausalLM"
        if name in FAMILIES:
            return name, FAMILIES[name]
    latent = ", which has latent KV (MLA)" if "kv_lora_rank" in raw else ""
    raise ModelLoadError(
        f"unsupported architecture {', '.join(map(str, names)) or '(none named)'} "
        f"(model_type {raw.get('model_type')!r}){latent}; supported are {', '.join(FAMILIES)}"
    )


def layer_windows(family: ModelFamily, raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return for each layer how many last positions it attends to (its own included), or None for all."""
    window = raw.get("sliding_window", family.sliding_window)
    if window is None or family.windows == "none":
        return (None,) * num_layers
    if family.windows == "all":
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    if family.windows == "switched":
        return (window,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
