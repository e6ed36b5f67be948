"""The tensors of an EAGLE-3 checkpoint: their names, and where they are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.base.errors import ModelLoadError
from engine.loading.contents import check_tensors
from engine.loading.mapped_tensors import MappedTensor
from engine.loading.target_parts import WeightTarget, whole
from engine.loading.targets import weight_targets
from engine.loading.tensor_groups import Expected
from engine.model_config.eagle3 import Eagle3Config
from engine.parallel.shard import Shard

TABLE, DRAFTED = "embed_tokens.weight", "d2t"
"""The names of the embedding table and of the map from draft ids to the model's: what to add to each."""
MASK = "t2d"
"""The name of the mask of the model's tokens that may be drafted, which the map says as well."""


def eagle3_targets(config: Eagle3Config, present: Mapping[str, MappedTensor]) -> dict[str, WeightTarget]:
    """Return the targets of the layer's tensors in a checkpoint with the tensors `present`, by their names.

    Raises ModelLoadError if others are there, or some are missing or have another shape.
    """
    targets = dict(_targets(config, present))
    expected = [Expected(name, target.shape) for name, target in targets.items()]
    drafts = config.layer.vocab_size
    if drafts != config.vocab_size or DRAFTED in present:
        expected.append(Expected(DRAFTED, (drafts,), ("I64", "I32")))
    if MASK in present:
        expected.append(Expected(MASK, (config.vocab_size,), ("BOOL", "U8")))
    try:
        check_tensors(present, expected, list(present), "EAGLE-3 layer")
    except ModelLoadError as error:
        raise ModelLoadError(f"speculation.model, an EAGLE-3 checkpoint: {error}") from None
    return targets


def _targets(config: Eagle3Config, present: Mapping[str, MappedTensor]) -> Iterator[tuple[str, WeightTarget]]:
    layer, hidden = config.layer, config.layer.hidden_size
    name_of_layer = "layers.0." if any(name.startswith("layers.0.") for name in present) else "midlayer."
    for name, target in weight_targets(layer, Shard(), ()).items():
        ours = name.removeprefix("model.").replace("layers.0.", name_of_layer)
        if target.parameter == "layers.0.attention.qkv_proj.weight":
            target = target._replace(shape=(target.shape[0], 2 * hidden))
        if ours == TABLE:
            target = target._replace(shape=(config.vocab_size, hidden), rows=slice(None), part=())
        if ours != TABLE or TABLE in present:
            yield ours, target
    yield f"{name_of_layer}hidden_norm.weight", whole("layers.0.hidden_norm.weight", hidden)
    width = config.num_states * config.model_hidden_size
    yield "fc.weight", whole("reduction.weight", hidden, width)
    if config.norms_states:
        yield "input_norm.weight", whole("states_norm.weight", width)
    for index in range(config.num_states * config.norms_each):
        yield f"fc_norm.{index}.weight", whole(f"state_norms.{index}.weight", config.model_hidden_size)
