"""The targets of a recurrent layer's tensors: those of a gated delta net."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from engine.loading.target_parts import Places, WeightTarget, fused, summed, whole
from engine.model_config.config import ModelConfig
from engine.parallel.shard import Shard


def delta_net_targets(
    config: ModelConfig, shard: Shard, theirs: str, ours: str
) -> Iterator[tuple[str, WeightTarget]]:
    """Yield the targets of one layer; ranks divide its heads."""
    shape, names, hidden = config.delta_net, config.names.delta_net, config.hidden_size
    assert shape is not None and names is not None
    keys, heads = shape.num_key_heads * shape.key_dim, shape.num_value_heads
    own_keys, own_values = shard.part(keys), shard.part(shape.values)
    own_heads = np.arange(heads)[shard.part(heads)]
    channels = np.concatenate(
        [np.arange(n)[own] + first for first, n, own in ((0, keys, own_keys), (keys, keys, own_keys))]
        + [np.arange(shape.values)[own_values] + 2 * keys]
    )
    z = np.arange(shape.values)[own_values]
    total = shape.channels + shape.values
    # The rows of queries, keys, values and z, and of strengths and decays, kind by kind.
    projections, gates = (
        np.concatenate((channels, z + shape.channels)),
        np.concatenate((own_heads, own_heads + heads)),
    )
    if len(names.projections) == 1:
        each = shape.values // shape.num_key_heads
        sizes = (shape.key_dim, shape.key_dim, each, each)
        rows = _by_kind(shape.num_key_heads, sizes)[projections]
        yield from fused([f"{theirs}.{names.projections[0]}"], f"{ours}.in_proj", [(total, rows)], hidden, False)
    else:
        pair = [(shape.channels, channels), (shape.values, z)]
        yield from fused(
            [f"{theirs}.{name}" for name in names.projections], f"{ours}.in_proj", pair, hidden, False
        )
    if len(names.gates) == 1:
        each = heads // shape.num_key_heads
        rows = _by_kind(shape.num_key_heads, (each, each))[gates]
        target = WeightTarget(f"{ours}.gates_proj", slice(None), (2 * heads, hidden), (rows,))
        yield f"{theirs}.{names.gates[0]}.weight", target
    else:
        for place, name in enumerate(names.gates):
            first = place * len(own_heads)
            into = slice(first, first + len(own_heads))
            yield (
                f"{theirs}.{name}.weight",
                WeightTarget(f"{ours}.gates_proj", into, (heads, hidden), (own_heads,)),
            )
    shape_of_conv = (shape.channels, 1, shape.kernel)
    conv = WeightTarget(f"{ours}.conv", slice(None), shape_of_conv, (channels,), (-1, shape.kernel))
    yield f"{theirs}.conv1d.weight", conv
    for name, parameter in (("A_log", "log_decay"), ("dt_bias", "decay_bias")):
        target = WeightTarget(f"{ours}.{parameter}", slice(None), (heads,), (own_heads,), added=0.0)
        yield f"{theirs}.{name}", target
    yield f"{theirs}.norm.weight", whole(f"{ours}.norm", shape.value_dim)
    yield from summed(f"{theirs}.out_proj", f"{ours}.o_proj", hidden, shape.values, shard, False)


def _by_kind(num_heads: int, sizes: Sequence[int]) -> Places:
    """Return the rows of a projection in the order of kinds; the file groups them by key head."""
    rows = np.arange(num_heads * sum(sizes)).reshape(num_heads, -1)
    return np.concatenate([kind.flatten() for kind in np.split(rows, np.cumsum(sizes)[:-1], axis=1)])
