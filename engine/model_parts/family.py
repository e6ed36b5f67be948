"""Model families: how their config.json describes a model's parts, and how their files name the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.base.errors import ModelLoadError
from engine.model_parts.config_keys import TrackedConfig, layered
from engine.model_parts.parts import ModelParts


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of a sparse layer's weights, below the layer's name."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    correction: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    may_be_stacked: bool = False
    """Whether the experts of a layer may be one tensor, [experts, outputs, inputs], gates before ups."""
    are_stacked: bool = False
    """Whether the experts of a layer are one tensor, [experts, inputs, outputs]."""
    takes_turns: bool = True
    """Whether gates and ups of such a tensor alternate; otherwise all gates come first."""


@dataclass(frozen=True, slots=True)
class DeltaNetNames:
    """The names of a recurrent layer's projections, below "linear_attn"."""

    projections: tuple[str, ...]
    """To queries, keys and values, and to z: two, or one grouped by key head."""
    gates: tuple[str, ...]
    """To strengths and to decays: two, or one grouped by key head."""


@dataclass(frozen=True, slots=True)
class MTPNames:
    """The names of the weights of the layer that predicts one token further (`engine/models/mtp.py`); "{layers}"
    stands for the number of layers.
    """

    layer: str = "model.layers.{layers}"
    embedding_norm: str = "model.layers.{layers}.enorm"
    hidden_norm: str = "model.layers.{layers}.hnorm"
    projection: str = "model.layers.{layers}.eh_proj"
    norm: str = "model.layers.{layers}.shared_head.norm"


QWEN_MTP = MTPNames("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
"""The names in Qwen3-Next and later."""


@dataclass(frozen=True, slots=True)
class WeightNames:
    """The names of a layer's weights in a checkpoint, below "model.layers.N"."""

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Projections to queries, keys and values: three, or one fused."""
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Projections of the MLP: gate and up, or one fused."""
    mlp: str = "mlp"
    """The MLP of layers without experts."""
    attention_norm: str = "input_layernorm"
    """The norm before attention."""
    mlp_norm: str = "post_attention_layernorm"
    """The norm before the MLP."""
    attended_norm: str = "post_attention_layernorm"
    """The norm after attention, in families that have one."""
    mlp_output_norm: str = "post_feedforward_layernorm"
    """The norm after the MLP, in families that have one."""
    experts: ExpertNames = ExpertNames()
    delta_net: DeltaNetNames | None = None
    """Names in families with recurrent layers."""
    left_out: tuple[str, ...] = ()
    """Prefixes of weights that text does not need; "{layers}" stands for the number of layers."""
    mtp: MTPNames | None = None
    """Names in families with a layer for MTP."""


@dataclass(frozen=True, slots=True)
class Family:
    """One model family. A module of `engine.families` has one, called FAMILY."""

    architectures: tuple[str, ...]
    """Its names in config.json."""
    read: Callable[[Mapping[str, Any]], ModelParts]
    """Reads the parts from a config.json. May raise ModelLoadError, KeyError, TypeError and ValueError."""
    names: WeightNames = WeightNames()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that config.json may omit."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values that all models of the family have. The decoder supports only these."""

    def parts_of(self, config: TrackedConfig) -> ModelParts:
        """Read a model's parts. Raises ModelLoadError and the errors of `read`."""
        for key, expected in {**_FIXED, **self.fixed}.items():
            if (value := config.get(key)) is not None and value != expected:
                raise ModelLoadError(f"{key} is {value!r}, which is not supported: expected {expected!r}")
        return self.read(layered(config, self.defaults))


_OF_WHOLE = ("architectures", "tie_word_embeddings")
"""Keys that are read next to a nested text model, not in it."""
_FIXED = {"is_causal": True}
"""Values that the models of all families have."""


def text_config(raw: Mapping[str, Any]) -> TrackedConfig:
    """Return a config.json with the keys of its text model, which may be nested. These replace the outer keys,
    unless they are empty, except for those of the whole model.
    """
    inside = raw.get("text_config") or {}
    outer = {key: value for key, value in raw.items() if key != "text_config"}
    said = {key: value for key, value in inside.items() if value is not None or outer.get(key) is None}
    whole = {key: outer[key] for key in _OF_WHOLE if outer.get(key) is not None}
    return TrackedConfig({**outer, **said, **whole})
