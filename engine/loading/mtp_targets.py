"""The MTP layer in a checkpoint: whether it is there, its shape, and where its tensors are loaded."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import astuple, replace

from engine.base.errors import ModelLoadError
from engine.loading.target_parts import WeightTarget, whole
from engine.loading.targets import HEAD, weight_targets
from engine.model_config.config import ModelConfig
from engine.model_parts.family import MTPNames
from engine.parallel.shard import Shard
from engine.settings.config import EngineConfig

_MODELS = "DeepSeek-V3 and R1, GLM-4.5 to 4.7, Qwen3-Next, Qwen3.5 and 3.6"
_OTHERS = 'choose another engine.speculation.method, for example "ngram"'


def check_mtp(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ValueError if the settings ask for MTP and the model or another setting excludes it."""
    if config.speculation is None or config.speculation.method != "mtp":
        return
    if model.names.mtp is None:
        raise ValueError(
            f'speculation.method is "mtp", but Raydix knows no MTP layer of {model.architecture}; {_MODELS} have '
            f"one: {_OTHERS}"
        )


def mtp_config(model: ModelConfig) -> ModelConfig:
    """Return the config of a model of one layer, the MTP layer. It has attention, and experts if the model has."""
    kind = next(layer for layer in reversed(model.layers) if not layer.is_recurrent)
    experts = None if model.experts is None else replace(model.experts, layers=frozenset({0}))
    return replace(model, layers=(kind,), experts=experts, delta_net=None)


def mtp_bytes(model: ModelConfig, element_bytes: int) -> tuple[int, int]:
    """Return the bytes of the MTP layer, and of the tables that it shares with the model, or has on one of several
    ranks, at `element_bytes` per plain number.
    """
    layer, hidden = mtp_config(model), model.hidden_size
    tables = (1 if layer.tied_embeddings else 2) * layer.vocab_size * hidden * element_bytes
    added = 2 * hidden * (hidden + 1) * element_bytes  # the projection and two norms
    return layer.weight_bytes(element_bytes) - tables + added, tables


def mtp_targets(model: ModelConfig, present: Container[str]) -> dict[str, WeightTarget]:
    """Return the targets of the MTP layer's tensors in a checkpoint with the tensors `present`, by their names."""
    layer, hidden = mtp_config(model), model.hidden_size
    names = _names(model)
    renamed = {"model.norm.weight": f"{names.norm}.weight"}
    found = {
        name.replace("model.layers.0.", f"{names.layer}.", 1): target
        for name, target in weight_targets(layer, Shard(), _Renamed(present, names.layer)).items()
        if name not in ("model.embed_tokens.weight", HEAD)
    }
    added = model.norms.added
    return {
        **{renamed.get(name, name): target for name, target in found.items()},
        f"{names.embedding_norm}.weight": whole("embedding_norm.weight", hidden)._replace(added=added),
        f"{names.hidden_norm}.weight": whole("hidden_norm.weight", hidden)._replace(added=added),
        f"{names.projection}.weight": whole("projection.weight", hidden, 2 * hidden),
    }


def check_mtp_tensors(model: ModelConfig, present: Container[str], path: object) -> None:
    """Raise ModelLoadError if a checkpoint has no MTP layer: files that were converted often lack it."""
    if missing := _missing(model, present):
        raise ModelLoadError(
            f'speculation.method is "mtp", but the weights in {path} lack {", ".join(missing)}: they were saved '
            f"without the MTP layer. Use the files that the model's makers published, or {_OTHERS}"
        )


def has_mtp_layer(model: ModelConfig, present: Container[str]) -> bool:
    """Whether a checkpoint has an MTP layer."""
    return model.names.mtp is not None and not _missing(model, present)


def is_of_mtp(model: ModelConfig, name: str) -> bool:
    """Whether a tensor is a part of the MTP layer."""
    return any(name.startswith(f"{prefix}.") for prefix in astuple(_names(model)))


def _missing(model: ModelConfig, present: Container[str]) -> list[str]:
    """Return the names of tensors that a checkpoint lacks, of those that only an MTP layer has."""
    names = _names(model)
    needed = names.embedding_norm, names.hidden_norm, names.norm, names.projection
    return [f"{name}.weight" for name in needed if f"{name}.weight" not in present]


def _names(model: ModelConfig) -> MTPNames:
    """Return the names with the number of layers in them."""
    names, count = model.names.mtp, model.num_layers
    assert names is not None, "checked by check_mtp"
    all_of = names.layer, names.embedding_norm, names.hidden_norm, names.projection, names.norm
    return MTPNames(*(name.format(layers=count) for name in all_of))


class _Renamed(Container[str]):
    """The tensors of a checkpoint, with the MTP layer's names as if it were layer 0."""

    def __init__(self, present: Container[str], layer: str) -> None:
        self._present, self._layer = present, layer

    def __contains__(self, name: object) -> bool:
        first = "model.layers.0."
        is_ours = isinstance(name, str) and name.startswith(first)
        return is_ours and f"{self._layer}.{str(name).removeprefix(first)}" in self._present
