"""Bounds of the values in a config.json, checked whenever any family reads one.

They are far wider than any model needs. A value outside of them comes from a damaged or hostile file, which could
make a server exhaust its memory, divide by zero, or compute only NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.base.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class _Bound:
    """A condition on a value."""

    expected: str
    is_met: Callable[[object], bool]


def _count(low: int, high: int) -> _Bound:
    def is_met(value: object) -> bool:
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return is_whole and not isinstance(value, bool) and low <= value <= high  # type: ignore[operator]

    return _Bound(f"an integer from {low} to {high}", is_met)


def _number(low: float, high: float) -> _Bound:
    def is_met(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return low <= value <= high  # NaN is in no range

    return _Bound(f"a number from {low:g} to {high:g}", is_met)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or (type(value) is int and value in (0, 1))


_LAYERS, _HEADS, _WIDTH, _INNER = _count(1, 4096), _count(1, 2**16), _count(1, 2**20), _count(1, 2**24)
_OPTIONAL_HEADS, _OPTIONAL_INNER = _count(0, 2**16), _count(0, 2**24)
_EPSILON, _BASE, _FACTOR, _CAP = _number(1e-30, 1), _number(1, 1e15), _number(1e-6, 1e6), _number(0, 1e9)
_FLAG = _Bound("true or false", _is_flag)
_KEYS: Mapping[_Bound, str] = {
    _LAYERS: "num_hidden_layers",
    _count(0, 4096): """first_k_dense_replace num_kv_shared_layers max_window_layers no_rope_layer_interval
        interleave_moe_layer_step decoder_sparse_step""",
    _count(1, 4097): "full_attention_interval sliding_window_pattern global_attn_every_n_layers",
    _HEADS: """num_attention_heads num_key_value_heads num_global_key_value_heads head_dim global_head_dim
        v_head_dim
        qk_nope_head_dim qk_rope_head_dim kv_lora_rank q_lora_rank linear_value_head_dim linear_num_value_heads
        linear_num_key_heads linear_key_head_dim linear_conv_kernel_dim rotary_dim""",
    _OPTIONAL_HEADS: """num_experts num_local_experts n_routed_experts n_shared_experts num_experts_per_tok n_group
        topk_group""",
    _WIDTH: "hidden_size embedding_size",
    _INNER: "intermediate_size vocab_size",
    _OPTIONAL_INNER: """moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp type_vocab_size
        hidden_size_per_layer_input vocab_size_per_layer_input""",
    _count(1, 2**31 - 1): """max_position_embeddings original_max_position_embeddings sliding_window
        attention_chunk_size local_attention""",
    _EPSILON: "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon",
    _BASE: "rope_theta global_rope_theta local_rope_theta rope_local_base_freq",
    _FACTOR: """factor low_freq_factor high_freq_factor beta_fast beta_slow short_factor long_factor
        query_pre_attn_scalar embedding_multiplier residual_multiplier attention_multiplier logits_scaling
        routed_scaling_factor""",
    _number(1e-6, 1): "partial_rotary_factor",
    _CAP: """attention_factor mscale mscale_all_dim final_logit_softcapping attn_logit_softcapping swiglu_limit
        swiglu_alpha llama_4_scaling_beta attn_scale floor_scale""",
    _FLAG: """tie_word_embeddings attention_bias attention_out_bias mlp_bias norm_bias use_qk_norm
        use_sliding_window
        norm_topk_prob use_bidirectional_attention rope_interleave attn_output_gate attention_k_eq_v truncate
        use_double_wide_mlp enable_moe_block attn_temperature_tuning classifier_bias""",
}
_BOUNDS = {key: bound for bound, keys in _KEYS.items() for key in keys.split()}


def check_bounds(key: str, value: object, path: str = "") -> None:
    """Raise ModelLoadError for a value that a key cannot have; null always passes and is ignored.

    Each entry of a list is checked. `path` precedes the key in messages.
    """
    bound = _BOUNDS.get(key)
    if bound is None or isinstance(value, Mapping):
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelLoadError(f"{path}{key} is {value}; expected a finite number")
        return
    for one in value if isinstance(value, list) else [value]:
        if one is not None and not bound.is_met(one):
            shown = repr(one) if len(repr(one)) <= 40 else f"{repr(one)[:40]}…"
            raise ModelLoadError(
                f"config.json has {path}{key} = {shown}; expected {bound.expected}; download the model again"
            )
