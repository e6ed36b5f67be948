"""Reads a model's parts from the keys of config.json that most families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.base.errors import ModelLoadError
from engine.model_parts.config_keys import layered
from engine.model_parts.experts_config import ExpertsConfig
from engine.model_parts.parts import (
    Activation,
    AttentionConfig,
    LatentAttentionConfig,
    LayerKind,
    MLPConfig,
    NormConfig,
    QKNorm,
)
from engine.model_parts.rope import RopeConfig, rope_settings, stretched_scale

Raw = Mapping[str, Any]
"""The contents of a config.json."""
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


def read_attention(
    raw: Raw,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool | None = None,
    output_bias: bool | None = None,
    qk_norm: QKNorm = "none",
    scale: float | None = None,
) -> AttentionConfig:
    """Read the heads. `num_kv_heads` and `head_dim` are the family's defaults for missing keys.

    `qkv_bias`, `output_bias`: whether the projections have biases; None: the key `attention_bias` decides.
    `scale`: factor of scores; None: one over the root of head_dim.
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
        dim**-0.5 if scale is None else scale,
        is_biased if qkv_bias is None else qkv_bias,
        is_biased if output_bias is None else output_bias,
        qk_norm,
    )


def read_latent_attention(raw: Raw) -> LatentAttentionConfig:
    """Read latent attention from DeepSeek's keys. Raises ModelLoadError."""
    rank, rope_dim, plain_dim = (int(raw[key]) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
    compressed, is_biased = raw.get("q_lora_rank"), bool(raw.get("attention_bias", False))
    if is_biased and compressed is None:
        raise ModelLoadError(
            "attention_bias is true and q_lora_rank null; expected biases only with a q_lora_rank"
        )
    made = {"qk_head_dim": plain_dim + rope_dim, "num_key_value_heads": raw["num_attention_heads"]}
    for key, expected in made.items():
        if raw.get(key, expected) != expected:
            raise ModelLoadError(f"{key} is {raw[key]}, other keys make it {expected}")
    return LatentAttentionConfig(
        int(raw["num_attention_heads"]),
        1,
        rank + rope_dim,
        (plain_dim + rope_dim) ** -0.5 * stretched_scale(raw),
        is_biased,
        is_biased,
        rank=rank,
        rope_dim=rope_dim,
        plain_dim=plain_dim,
        value_dim=int(raw["v_head_dim"]),
        query_rank=None if compressed is None else int(compressed),
        is_interleaved=bool(raw.get("rope_interleave", True)),
    )


def read_mlp(
    raw: Raw, *, bias: bool = False, size: str = "intermediate_size", activation: str = "hidden_act"
) -> MLPConfig:
    """Read the dense MLP. `size` and `activation` are the family's keys. Raises ModelLoadError for an unsupported
    activation, and for two that differ.
    """
    named = {activation: raw.get(activation) or "silu"}
    named |= {key: raw[key] for key in ("hidden_act", "hidden_activation") if raw.get(key) is not None}
    if unknown := [name for name in named.values() if name not in _ACTIVATIONS]:
        raise ModelLoadError(f"unsupported activation {unknown[0]!r}; supported are {', '.join(_ACTIVATIONS)}")
    found = {_ACTIVATIONS[name] for name in named.values()}
    if len(found) > 1:
        texts = " and ".join(f"{key} {name!r}" for key, name in named.items())
        raise ModelLoadError(f"{texts} are different activations: expected the same, or only {activation}")
    return MLPConfig(int(raw[size]), bias, found.pop())


def read_norms(raw: Raw, eps: float = 1e-6, *, before: bool = True, after: bool = False) -> NormConfig:
    """Read the norms; `eps` is the family's default."""
    return NormConfig(float(raw.get("rms_norm_eps", eps)), before, after)


def read_qwen_experts(raw: Raw, *, renormalizes: bool) -> ExpertsConfig | None:
    """Read experts from Qwen's keys; `renormalizes` is the family's default. Raises ModelLoadError."""
    step, count = int(raw.get("decoder_sparse_step", 1)), int(raw["num_hidden_layers"])
    if step < 1:
        raise ModelLoadError(
            f"decoder_sparse_step is {step}, expected at least 1 (1: every layer is sparse, 2: every second)"
        )
    dense = frozenset(raw.get("mlp_only_layers") or ())
    return ExpertsConfig.from_config(
        raw,
        frozenset(range(step - 1, count, step)) - dense,
        renormalizes=bool(raw.get("norm_topk_prob", renormalizes)),
        counted=("num_experts", "num_local_experts"),
        size="moe_intermediate_size",
    )


def read_rope(
    raw: Raw, attention: AttentionConfig, theta: float = 10000.0, *, is_partial: bool = False
) -> RopeConfig:
    """Read the common rotation of all layers with one; `theta` is the family's default; `is_partial`: whether it
    may rotate only a part of each head.
    """
    return RopeConfig.from_config(raw, attention.turned_dim, theta, is_partial=is_partial)


def with_rope(raw: Raw, rope: Raw) -> Raw:
    """Return a config with the family's settings of its rotation, if it has none."""
    return raw if rope_settings(raw) else layered({"rope_parameters": rope}, raw)


def read_ropes(
    raw: Raw, attention: AttentionConfig, theta: float, local_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """Read two rotations, of layers that attend to all positions and of those with a window. `rope_scaling`, in
    files from before transformers 5, changes only the former.
    """
    named, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    full = layered(scaling, named.get("full_attention") or {}, {"rope_theta": theta})
    sliding = layered(named.get("sliding_attention") or {}, {"rope_theta": local_theta})
    limit = int(raw["max_position_embeddings"])
    dim = attention.head_dim
    return RopeConfig.from_parameters(full, dim, limit), RopeConfig.from_parameters(sliding, dim, limit)


def alike(rope: RopeConfig, raw: Raw, window: int | None = None) -> tuple[LayerKind, ...]:
    """Return layers that all have the same rotation and window."""
    return (LayerKind(rope, window),) * int(raw["num_hidden_layers"])


def windowed(rope: RopeConfig, windows: Sequence[int | None]) -> tuple[LayerKind, ...]:
    """Return layers with the same rotation and the given windows."""
    return tuple(LayerKind(rope, window) for window in windows)


def turned_layers(raw: Raw) -> list[bool]:
    """Return for each layer whether positions rotate its queries and keys: by the list `no_rope_layers` (0: they
    do not), or else in all except every fourth (`no_rope_layer_interval`). Raises ModelLoadError.
    """
    count, step = int(raw["num_hidden_layers"]), raw.get("no_rope_layer_interval", 4)
    turned = raw.get("no_rope_layers") or [(layer + 1) % step != 0 for layer in range(count)]
    if len(turned) < count:
        raise ModelLoadError(f"no_rope_layers lists {len(turned)} layers, num_hidden_layers says {count}")
    return [bool(is_turned) for is_turned in turned[:count]]


def every(step: int, raw: Raw) -> list[str]:
    """Return the kinds of layers if every `step`-th attends to all positions, and the others in a window."""
    kinds = ("sliding_attention", "full_attention")
    return [kinds[(layer + 1) % step == 0] for layer in range(int(raw["num_hidden_layers"]))]


def listed_windows(raw: Raw, window: int | None, kinds: Sequence[str]) -> list[int | None]:
    """Return the window of each layer: `window` for "sliding_attention" in `kinds`. Raises ModelLoadError."""
    count = int(raw["num_hidden_layers"])
    if len(kinds) != count:
        raise ModelLoadError(f"layer_types lists {len(kinds)} layers, num_hidden_layers says {count}")
    check_kinds(kinds, "sliding_attention", "full_attention")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def check_kinds(kinds: Sequence[str], *known: str) -> None:
    """Raise ModelLoadError for a kind of layer that is not `known`."""
    if unknown := next((kind for kind in kinds if kind not in known), None):
        raise ModelLoadError(f"unsupported layer type {unknown!r}; supported here are {', '.join(known)}")


def switched_windows(raw: Raw, default: int) -> list[int | None]:
    """Return Qwen2's windows: of the layers in `layer_types`, or from `max_window_layers` on, if
    `use_sliding_window` is true.
    """
    count, window = int(raw["num_hidden_layers"]), raw.get("sliding_window", default)
    first, kinds = raw.get("max_window_layers", 28), raw.get("layer_types")
    if window is None or not raw.get("use_sliding_window", False):
        return [None] * count
    if kinds is not None:
        return listed_windows(raw, window, kinds)
    return [window if layer >= first else None for layer in range(count)]
