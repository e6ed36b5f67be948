"""Reads a model's parts from a config.json, by the keys that most families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.models.errors import ModelLoadError
from engine.models.parts import AttentionConfig, LayerKind, MLPConfig, QKNorm
from engine.models.rope import RopeConfig

Raw = Mapping[str, Any]
"""The contents of a config.json."""


def read_attention(
    raw: Raw,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool | None = None,
    output_bias: bool | None = None,
    qk_norm: QKNorm = "none",
) -> AttentionConfig:
    """Read the heads. `num_kv_heads` and `head_dim` are the family's defaults of keys that may be missing.

    `qkv_bias`, `output_bias`: whether the projections have biases; None: as the key `attention_bias` says.
    """
    num_heads = int(raw["num_attention_heads"])
    kv_heads = raw.get("num_key_value_heads", num_kv_heads) or num_heads
    if num_heads % kv_heads:
        raise ModelLoadError(f"{num_heads} query heads cannot share {kv_heads} key-value heads evenly")
    dim = raw.get("head_dim") or head_dim or raw["hidden_size"] // num_heads
    is_biased = bool(raw.get("attention_bias", False))
    return AttentionConfig(
        num_heads,
        kv_heads,
        dim,
        dim**-0.5,
        is_biased if qkv_bias is None else qkv_bias,
        is_biased if output_bias is None else output_bias,
        qk_norm,
    )


def read_mlp(raw: Raw, *, bias: bool = False) -> MLPConfig:
    """Read the dense MLP. Raises ModelLoadError for an activation other than SiLU."""
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelLoadError(f"unsupported activation {activation!r}; supported is silu")
    return MLPConfig(int(raw["intermediate_size"]), bias)


def read_rope(raw: Raw) -> RopeConfig:
    """Read the one rotation of all layers."""
    return RopeConfig.from_config(raw, int(raw["max_position_embeddings"]))


def alike(raw: Raw, window: int | None = None) -> tuple[LayerKind, ...]:
    """Return layers that all have the same rotation and window."""
    return (LayerKind(read_rope(raw), window),) * int(raw["num_hidden_layers"])


def windowed(raw: Raw, windows: Sequence[int | None]) -> tuple[LayerKind, ...]:
    """Return layers with the same rotation and a window each."""
    rope = read_rope(raw)
    return tuple(LayerKind(rope, window) for window in windows)


def listed_windows(raw: Raw, window: int | None, kinds: Sequence[str]) -> list[int | None]:
    """Return the window of each layer: `window` for "sliding_attention" in `kinds`. Raises ModelLoadError."""
    count = int(raw["num_hidden_layers"])
    if len(kinds) != count:
        raise ModelLoadError(f"layer_types lists {len(kinds)} layers, num_hidden_layers says {count}")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def switched_windows(raw: Raw, default: int) -> list[int | None]:
    """Return Qwen2's windows: of the layers in `layer_types`, or from `max_window_layers` on, if
    `use_sliding_window` says so.
    """
    count, window = int(raw["num_hidden_layers"]), raw.get("sliding_window", default)
    if window is None or not raw.get("use_sliding_window", False):
        return [None] * count
    kinds = raw.get("layer_types")
    if kinds is not None:
        return listed_windows(raw, window, kinds)
    first = raw.get("max_window_layers", 28)
    return [window if layer >= first else None for layer in range(count)]
