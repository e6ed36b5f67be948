"""The targets of a checkpoint's tensors: name, shape, and rows of the decoder's fused parameters.

    checkpoint                                  decoder
    model.layers.3.self_attn.q_proj.weight ──▶  layers.3.attention.qkv_proj.weight[: q]
    model.layers.3.self_attn.k_proj.weight ──▶                                    [q : q + k]   ...

A family's own names of weights are in its description (`WeightNames`); the names that all families share are here.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import numpy as np

from engine.loading.delta_net_targets import delta_net_targets
from engine.loading.gemma4_targets import branch_targets, experts_and_mlp_targets, inputs_targets
from engine.loading.target_parts import Own, Places, WeightTarget, fused, summed, whole
from engine.model_config.config import ModelConfig
from engine.model_parts.experts_config import ExpertsConfig
from engine.model_parts.parts import LatentAttentionConfig, MLPConfig
from engine.parallel.shard import Shard

HEAD = "lm_head.weight"
"""The name of the output head."""
_PLACES = (
    ("model.", ""),
    ("", ""),  # saved by itself
    ("language_model.model.", "language_model."),  # the text model of one with vision
    ("model.language_model.", ""),
    ("language_model.", "language_model."),
)
"""Prefixes of the decoder's names and of the output head, for each place of a decoder in a checkpoint."""


def weight_targets(config: ModelConfig, shard: Shard, present: Container[str]) -> dict[str, WeightTarget]:
    """Return the target of this rank's part of each tensor of a checkpoint, by the tensor's name.

    `present` are the names of the checkpoint's tensors, by which the decoder's prefix is found.
    """
    decoder, head = next((place for place in _PLACES if f"{place[0]}embed_tokens.weight" in present), _PLACES[0])
    sparse = min(config.experts.layers, default=0) if config.experts is not None else 0
    is_stacked = config.names.experts.may_be_stacked and (
        f"{decoder}layers.{sparse}.{config.names.experts.block}.experts.gate_up_proj" in present
    )
    return {
        f"{head}{name}" if name == HEAD else f"{decoder}{name}": target
        for name, target in _targets(config, shard, is_stacked)
    }


def _targets(config: ModelConfig, shard: Shard, is_stacked: bool) -> Iterator[tuple[str, WeightTarget]]:
    """`is_stacked`: whether the experts of a layer are one tensor, in a family that allows it."""
    names = config.names
    yield "embed_tokens.weight", _table("embed.weight", config, shard)
    yield "norm.weight", _norm("norm.weight", config)
    if not config.tied_embeddings:
        yield HEAD, _table("lm_head.weight", config, shard)
    if config.inputs is not None:
        yield from inputs_targets(config, config.inputs)
    for layer in range(config.num_layers):
        at = f"layers.{layer}"
        if config.norms.before:
            yield f"{at}.{names.attention_norm}.weight", _norm(f"{at}.input_norm.weight", config)
            yield f"{at}.{names.mlp_norm}.weight", _norm(f"{at}.post_norm.weight", config)
        if config.norms.after:
            yield f"{at}.{names.attended_norm}.weight", _norm(f"{at}.attended_norm.weight", config)
            yield f"{at}.{names.mlp_output_norm}.weight", _norm(f"{at}.output_norm.weight", config)
        if config.layers[layer].is_recurrent:
            yield from delta_net_targets(config, shard, f"{at}.linear_attn", f"{at}.attention")
        elif isinstance(config.attention, LatentAttentionConfig):
            yield from _latent_targets(config, config.attention, shard, f"{at}.self_attn", f"{at}.attention")
        else:
            yield from _attention_targets(config, shard, layer, f"{at}.self_attn", f"{at}.attention")
        if config.norms.scales_layers:
            yield f"{at}.layer_scalar", whole(f"{at}.scale", 1)
        if config.inputs is not None:
            yield from branch_targets(config, config.inputs, at)
        experts = config.experts_in(layer)
        if experts is None:
            yield from _mlp_targets(config, config.mlp_in(layer), shard, f"{at}.{names.mlp}", f"{at}.mlp")
        elif experts.are_next_to_mlp:
            yield from _mlp_targets(config, config.mlp_in(layer), shard, f"{at}.{names.mlp}", f"{at}.mlp.mlp")
            yield from experts_and_mlp_targets(config, experts, shard, at)
        else:
            yield from _experts_targets(config, experts, shard, at, f"{at}.mlp", is_stacked)


def _attention_targets(
    config: ModelConfig, shard: Shard, layer: int, theirs: str, ours: str
) -> Iterator[tuple[str, WeightTarget]]:
    """Yield the targets of a layer's attention."""
    attention, hidden, order = config.attention_in(layer), config.hidden_size, _order(config, layer)
    dim, kv_heads = attention.head_dim, attention.num_kv_heads
    own_heads, own_kv_heads = shard.part(attention.num_heads), shard.kv_part(kv_heads)
    query, key = _in_order(own_heads, order), _in_order(own_kv_heads, order)
    value = _times(own_kv_heads, dim)
    outputs = attention.num_heads * dim
    queries_and_gates: tuple[int, Own] = (outputs, query)
    if attention.has_output_gate:
        queries_and_gates = (2 * outputs, _gates_and_queries(own_heads, order))
    parts = [queries_and_gates, (kv_heads * dim, key), (kv_heads * dim, value)]
    parts = parts[: 1 + attention.projects_keys + attention.projects_values]
    names = [f"{theirs}.{name}" for name in config.names.qkv[: len(parts)]]
    yield from fused(names, f"{ours}.qkv_proj", parts, hidden, attention.qkv_bias)
    yield from summed(
        f"{theirs}.o_proj", f"{ours}.o_proj", hidden, attention.num_heads * dim, shard, attention.output_bias
    )
    if attention.has_sinks:
        yield f"{theirs}.sinks", WeightTarget(f"{ours}.sinks", slice(None), (attention.num_heads,), (own_heads,))
    own = shard.attention(attention)
    queries, total, norm = own.num_heads, own.normed_heads, f"{ours}.qk_norm"
    heads = (
        ("q_norm", slice(0, queries), attention.num_heads, query),
        ("k_norm", slice(queries, total), kv_heads, key),
    )
    for name, rows, count, numbers in heads[: 1 + attention.projects_keys]:
        if attention.qk_norm == "heads":
            one_head = _in_order(slice(0, 1), order)
            yield (
                f"{theirs}.{name}.weight",
                WeightTarget(norm, rows, (dim,), (one_head,), None, config.norms.added),
            )
        elif attention.qk_norm == "full":
            yield f"{theirs}.{name}.weight", WeightTarget(norm, rows, (count * dim,), (numbers,), (-1, dim))


def _gates_and_queries(heads: slice, order: Places) -> Places:
    """Return the rows of some heads' gates and then of their queries, with numbers in this order. Files have each
    head's query before its gate.
    """
    dim, first = len(order), 2 * np.arange(heads.start, heads.stop)[:, None] * len(order)
    return np.concatenate(((first + dim + np.arange(dim)).flatten(), (first + order).flatten()))


def _latent_targets(
    config: ModelConfig, latent: LatentAttentionConfig, shard: Shard, theirs: str, ours: str
) -> Iterator[tuple[str, WeightTarget]]:
    """Yield the targets of a layer's latent attention; ranks divide its heads."""
    heads, hidden, rank = shard.part(latent.num_heads), config.hidden_size, latent.rank
    turned = np.arange(latent.rope_dim)
    if latent.is_interleaved:
        turned = turned.reshape(-1, 2).T.flatten()
    key = _in_order(slice(0, 1), np.concatenate((np.arange(rank), rank + turned)))
    query = _in_order(heads, np.concatenate((np.arange(latent.plain_dim), latent.plain_dim + turned)))
    first: tuple[str, int, Own] = ("q_proj", latent.query_outputs, query)
    if latent.query_rank is not None:
        first = ("q_a_proj", latent.query_rank, slice(0, latent.query_rank))
        shape = (latent.query_outputs, latent.query_rank)
        yield f"{theirs}.q_a_layernorm.weight", whole(f"{ours}.q_norm", latent.query_rank)
        yield f"{theirs}.q_b_proj.weight", WeightTarget(f"{ours}.q_b_proj.weight", slice(None), shape, (query,))
    names = [f"{theirs}.{first[0]}", f"{theirs}.kv_a_proj_with_mqa"]
    yield from fused(names, f"{ours}.qkv_a_proj", [first[1:], (latent.head_dim, key)], hidden, latent.qkv_bias)
    yield f"{theirs}.kv_a_layernorm.weight", whole(f"{ours}.latent_norm", rank)
    each = latent.plain_dim + latent.value_dim
    part, view = (_times(heads, each),), (-1, each, rank)
    target = WeightTarget(f"{ours}.expansion", slice(None), (latent.num_heads * each, rank), part, view)
    yield f"{theirs}.kv_b_proj.weight", target
    values = latent.num_heads * latent.value_dim
    yield from summed(f"{theirs}.o_proj", f"{ours}.o_proj", hidden, values, shard, latent.output_bias)


def _mlp_targets(
    config: ModelConfig, mlp: MLPConfig, shard: Shard, theirs: str, ours: str
) -> Iterator[tuple[str, WeightTarget]]:
    hidden, inner, bias = config.hidden_size, mlp.intermediate_size, mlp.bias
    names = [f"{theirs}.{name}" for name in config.names.gate_up]
    yield from fused(names, f"{ours}.gate_up_proj", [(inner, shard.part(inner))] * 2, hidden, bias)
    yield from summed(f"{theirs}.down_proj", f"{ours}.down_proj", hidden, inner, shard, bias)


def _experts_targets(
    config: ModelConfig, experts: ExpertsConfig, shard: Shard, theirs: str, ours: str, is_stacked: bool
) -> Iterator[tuple[str, WeightTarget]]:
    """Yield the targets of a sparse layer. Most files hold experts separately; memory stacks this rank's."""
    hidden, inner, own = config.hidden_size, experts.intermediate_size, shard.experts(experts)
    columns, width, names = shard.expert_columns(experts), own.intermediate_size, config.names.experts
    block = f"{theirs}.{names.block}"
    yield f"{block}.{names.router}.weight", whole(f"{ours}.router", experts.num_experts, hidden)
    if experts.router_bias:
        yield f"{block}.{names.router}.bias", whole(f"{ours}.router_bias", experts.num_experts)
    if experts.has_correction:
        shape = (experts.num_experts,)
        yield f"{block}.{names.correction}", WeightTarget(f"{ours}.correction", slice(None), shape, added=0.0)
    if experts.shared_size:
        shared = MLPConfig(experts.shared_size)
        yield from _mlp_targets(config, shared, shard, f"{block}.{names.shared}", f"{ours}.shared")
    if experts.shared_is_gated:
        yield f"{block}.{names.shared_gate}.weight", whole(f"{ours}.shared_gate", 1, hidden)
    if is_stacked:
        held, all_columns = slice(own.held.start, own.held.stop), np.arange(inner)[columns]
        both = np.concatenate((all_columns, inner + all_columns))
        stack = WeightTarget(f"{ours}.gate_up_proj", slice(None), (experts.num_experts, 2 * inner, hidden))
        yield f"{block}.experts.gate_up_proj", stack._replace(part=(held, both))
        stack = WeightTarget(f"{ours}.down_proj", slice(None), (experts.num_experts, hidden, inner))
        yield f"{block}.experts.down_proj", stack._replace(part=(held, slice(None), all_columns))
        return
    if names.are_stacked:
        yield from _stacked_targets(config, experts, shard, f"{block}.experts", ours)
        return
    for expert in range(experts.num_experts):
        name = f"{block}.experts.{expert}"
        place = own.held.index(expert) if expert in own.held else None
        for part, rows in ((names.gate, slice(0, width)), (names.up, slice(width, 2 * width))):
            target = _expert(own, ours, "gate_up_proj", place, rows, (inner, hidden), (columns,))
            yield f"{name}.{part}.weight", target
        every = slice(None)
        target = _expert(own, ours, "down_proj", place, every, (hidden, inner), (every, columns))
        yield f"{name}.{names.down}.weight", target


def _stacked_targets(
    config: ModelConfig, experts: ExpertsConfig, shard: Shard, theirs: str, ours: str
) -> Iterator[tuple[str, WeightTarget]]:
    """Yield the targets of experts that the file stacks too, with biases if they are clamped."""
    count, hidden, inner = experts.num_experts, config.hidden_size, experts.intermediate_size
    held, columns = shard.experts(experts).held, shard.expert_columns(experts)
    own, every = slice(held.start, held.stop), slice(None)
    step = 2 if config.names.experts.takes_turns else 1
    gates = np.arange(0, step * inner, step)[columns]
    both, all_columns = np.concatenate((gates, gates + (1 if step == 2 else inner))), np.arange(inner)[columns]
    biased = every if shard.rank == 0 or shard.splits_experts else slice(0)
    rows = own if biased == every else slice(0)
    shape = (count, hidden, 2 * inner)
    target = WeightTarget(f"{ours}.gate_up_proj", every, shape, (own, every, both), is_turned=True)
    yield f"{theirs}.gate_up_proj", target
    shape = (count, inner, hidden)
    target = WeightTarget(f"{ours}.down_proj", every, shape, (own, all_columns), is_turned=True)
    yield f"{theirs}.down_proj", target
    if experts.clamp is not None:
        target = WeightTarget(f"{ours}.gate_up_bias", every, (count, 2 * inner), (own, both))
        yield f"{theirs}.gate_up_proj_bias", target
        yield f"{theirs}.down_proj_bias", WeightTarget(f"{ours}.down_bias", biased, (count, hidden), (rows,))


def _expert(
    own: ExpertsConfig,
    ours: str,
    matrix: str,
    place: int | None,
    rows: slice,
    shape: tuple[int, ...],
    part: tuple[Own, ...],
) -> WeightTarget:
    """Return rows of a matrix of this rank's expert at `place`; no rows if it is another rank's (None)."""
    if place is None:
        place, rows, part = 0, slice(0), (slice(0),)
    if own.are_quantized:
        return WeightTarget(f"{ours}.apart.{place}.{matrix}.weight", rows, shape, part)
    return WeightTarget(f"{ours}.{matrix}", (place, rows), shape, part)


def _order(config: ModelConfig, layer: int) -> Places:
    """Return the order of a head's numbers in this layer (`RopeConfig.order`)."""
    rope, head_dim = config.layers[layer].rope, config.attention_in(layer).head_dim
    order = None if rope is None else rope.order(head_dim)
    return np.arange(head_dim) if order is None else np.array(order)


def _in_order(heads: slice, order: Places) -> Own:
    """Return the rows of some heads, with numbers in this order."""
    dim = len(order)
    if np.array_equal(order, np.arange(dim)):
        return _times(heads, dim)
    return (np.arange(heads.start, heads.stop)[:, None] * dim + order).flatten()


def _norm(parameter: str, config: ModelConfig) -> WeightTarget:
    return WeightTarget(parameter, slice(None), (config.hidden_size,), added=config.norms.added)


def _table(parameter: str, config: ModelConfig, shard: Shard) -> WeightTarget:
    """Return the target of a table with a row for each token. Rows after the last token's stay zero."""
    own = shard.rows(config.vocab_size)
    shape = (config.vocab_size, config.hidden_size)
    return WeightTarget(parameter, slice(0, own.stop - own.start), shape, (own,))


def _times(part: slice, count: int) -> slice:
    return slice(part.start * count, part.stop * count)
