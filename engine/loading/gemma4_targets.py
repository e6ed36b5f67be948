"""The targets of tensors that only Gemma 4's layers have."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from engine.loading.target_parts import WeightTarget, whole
from engine.model_config.config import ModelConfig
from engine.model_parts.experts_config import ExpertsConfig
from engine.model_parts.parts import LayerInputsConfig
from engine.parallel.shard import Shard

Targets = Iterator[tuple[str, WeightTarget]]


def inputs_targets(config: ModelConfig, inputs: LayerInputsConfig) -> Targets:
    """Yield the targets of the tokens' second embedding."""
    width = config.num_layers * inputs.size
    yield "embed_tokens_per_layer.weight", whole("inputs.table", inputs.vocab_size, width)
    yield "per_layer_model_projection.weight", whole("inputs.projection", width, config.hidden_size)
    yield "per_layer_projection_norm.weight", whole("inputs.norm", inputs.size)


def branch_targets(config: ModelConfig, inputs: LayerInputsConfig, at: str) -> Targets:
    """Yield the targets of the branch that adds it in the layer `at`."""
    hidden = config.hidden_size
    yield f"{at}.per_layer_input_gate.weight", whole(f"{at}.inputs.gate", inputs.size, hidden)
    yield f"{at}.per_layer_projection.weight", whole(f"{at}.inputs.projection", hidden, inputs.size)
    yield f"{at}.post_per_layer_input_norm.weight", whole(f"{at}.inputs.norm.weight", hidden)


def experts_and_mlp_targets(config: ModelConfig, experts: ExpertsConfig, shard: Shard, at: str) -> Targets:
    """Yield the targets of the experts next to the MLP of the layer `at`, and of their norms."""
    hidden, inner, ours = config.hidden_size, experts.intermediate_size, f"{at}.mlp"
    own, columns = shard.experts(experts).held, np.arange(inner)[shard.expert_columns(experts)]
    held, both = slice(own.start, own.stop), np.concatenate((columns, inner + columns))
    yield f"{at}.router.proj.weight", whole(f"{ours}.router", experts.num_experts, hidden)
    yield f"{at}.router.scale", whole(f"{ours}.router_scale", hidden)
    yield f"{at}.router.per_expert_scale", whole(f"{ours}.expert_scale", experts.num_experts)
    stack = WeightTarget(f"{ours}.gate_up_proj", slice(None), (experts.num_experts, 2 * inner, hidden))
    yield f"{at}.experts.gate_up_proj", stack._replace(part=(held, both))
    stack = WeightTarget(f"{ours}.down_proj", slice(None), (experts.num_experts, hidden, inner))
    yield f"{at}.experts.down_proj", stack._replace(part=(held, slice(None), columns))
    yield f"{at}.post_feedforward_layernorm_1.weight", whole(f"{ours}.mlp_norm.weight", hidden)
    yield f"{at}.pre_feedforward_layernorm_2.weight", whole(f"{ours}.input_norm.weight", hidden)
    yield f"{at}.post_feedforward_layernorm_2.weight", whole(f"{ours}.output_norm.weight", hidden)


def is_kv_of(name: str, layer: int) -> bool:
    """Whether a tensor belongs to a layer's keys or values."""
    return re.search(rf"layers\.{layer}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.", name) is not None
