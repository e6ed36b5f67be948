"""The configuration of an EAGLE-3 checkpoint: a layer that drafts for one model (`engine/models/eagle3.py`).

There are three forms of config.json: of SafeAILab/EAGLE, of SpecForge, and of Red Hat's speculators, which nests
the keys of the layer. All describe the layer by the keys of a Llama.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.base.errors import ModelLoadError
from engine.model_config.config import ModelConfig
from engine.model_files.json_files import parse_json

_LLAMA = "LlamaForCausalLM"
_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
_LAYER = "transformer_layer_config"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_WITHOUT_EFFECT = (
    "auto_map",
    "embed_requires_grad",
    "enable_sp_ulysses",
    "has_no_defaults_at_init",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
)
"""Keys of speculators that do not influence how the layer computes."""
_USUAL = {
    "has_lm_head": True,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
}
"""Keys of `eagle_config` in NVIDIA's files, with the values of a layer like those of others. Another number is an
unknown key; without a norm or a head, the files lack a tensor."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The layer, and the parts of a model that it was trained with."""

    layer: ModelConfig
    """A model of one layer, whose vocabulary is that of draft tokens."""
    vocab_size: int
    """Tokens of the model."""
    model_hidden_size: int
    layer_ids: tuple[int, ...] | None
    """The layers of the model whose states it reads, as the file numbers them; None: not named."""
    norms_residual: bool
    """Whether the residual stream begins with the normed states."""
    norms_states: bool
    """Whether the model's states are normed together before they are reduced."""
    norms_each: bool
    """Whether each of the model's states is normed before they are reduced (EAGLE-3.1)."""
    norms_output: bool
    """Whether a draft continues from the normed states of the layer (EAGLE-3.1)."""

    @classmethod
    def from_directory(cls, directory: Path, ignored_keys: Collection[str] = ()) -> Eagle3Config:
        """Read config.json; for `ignored_keys` see `UnusedKeys.check`. Raises ModelLoadError, also if it describes
        something else.
        """
        path = directory / "config.json"
        if not path.exists():
            raise ModelLoadError(f"speculation.model: there is no config.json in {directory}")
        try:
            config = cls._from_raw(parse_json(path), str(path))
            config.layer.unused_keys.check("EAGLE-3 layer", ignored_keys)
        except ModelLoadError as error:
            raise ModelLoadError(f"speculation.model, an EAGLE-3 checkpoint: {error}") from None
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            raise ModelLoadError(f"speculation.model: {path} describes no EAGLE-3 layer: {error}") from None
        return config

    @classmethod
    def _from_raw(cls, raw: Mapping[str, Any], name: str) -> Eagle3Config:
        _check_architecture(raw, name)
        rest = {key: value for key, value in raw.items() if key != _LAYER} | dict(raw.get(_LAYER) or {})
        for key in _WITHOUT_EFFECT:
            rest.pop(key, None)
        eagle = dict(rest.pop("eagle_config", None) or {})
        if eagle.pop("use_aux_hidden_state", True) is False:
            raise ModelLoadError(f"{name} has use_aux_hidden_state false: it reads no states of inner layers")
        if (eagle.get("parallel_draft_step") or 1) == 1:
            eagle.pop("parallel_draft_heads_num_layers", None)
        eagle = {key: value for key, value in eagle.items() if key not in _USUAL or value != _USUAL[key]}
        named = [ids for ids in (rest.pop(_LAYER_IDS, None), eagle.pop(_LAYER_IDS, None)) if ids]
        if any(ids != named[0] for ids in named):
            raise ModelLoadError(f"{name} names two lists of layers in {_LAYER_IDS}: {named[0]} and {named[1]}")
        rest |= {f"eagle_config.{key}": value for key, value in eagle.items()}
        drafts, hidden = rest.pop("draft_vocab_size", None), rest.pop("target_hidden_size", None)
        norms_residual = bool(rest.pop("norm_before_residual", False))
        norms_states, norms_each = bool(rest.pop("norm_before_fc", False)), bool(rest.pop("fc_norm", False))
        norms_output = bool(rest.pop("norm_output", False))
        if norms_states and norms_each:
            raise ModelLoadError(f"{name} has norm_before_fc and fc_norm, of which a layer has only one")
        vocab_size = int(rest["vocab_size"])
        rest |= {"architectures": [_LLAMA], "vocab_size": vocab_size if drafts is None else drafts}
        layer = ModelConfig.from_json(rest, {}, name)
        unsupported = {
            f"{layer.num_layers} layers": layer.num_layers != 1,
            "quantized weights": layer.weight_format is not None,
            "the embedding table as output head": layer.tied_embeddings,
        }
        if found := [what for what, is_there in unsupported.items() if is_there]:
            raise ModelLoadError(
                f"{name} describes {' and '.join(found)}: supported is one layer with plain weights and a head"
            )
        ids = tuple(int(index) for index in named[0]) if named else None
        norms = norms_residual, norms_states, norms_each, norms_output
        return cls(layer, vocab_size, hidden or layer.hidden_size, ids, *norms)

    @property
    def num_states(self) -> int:
        """Number of the model's layers whose states it reads."""
        return 3 if self.layer_ids is None else len(self.layer_ids)

    @property
    def num_parameters(self) -> int:
        """Number of its weights, without an embedding table."""
        hidden, layer = self.layer.hidden_size, self.layer
        table, norm, embeddings = layer.vocab_size * hidden, hidden, layer.attention.qkv_outputs * hidden
        reduction = self.num_states * self.model_hidden_size * (hidden + self.norms_states + self.norms_each)
        return layer.num_parameters - table + norm + embeddings + reduction

    def inner_layers(self, model: ModelConfig) -> tuple[int, ...]:
        """Return the layers of the model before which the residual stream is read (`Decoder.inner_layers`).

        Files number them in two ways. The first id tells which, because the first state that is read is always
        the one after two layers: a 1 is the second layer, after which to read; else, ids are numbers of layers
        before the state. Without ids they are 2, half of the layers, and all but three, as in SafeAILab/EAGLE.
        Raises ModelLoadError.
        """
        count = model.num_layers
        ids = self.layer_ids or (2, count // 2, count - 3)
        if ids[0] == 1:
            ids = tuple(index + 1 for index in ids)
        if list(ids) != sorted(set(ids)) or not (ids[0] >= 0 and ids[-1] < count):
            raise ModelLoadError(
                f"speculation.model reads states of the model after {', '.join(map(str, ids))} layers: expected "
                f"ascending numbers below {count}, the layers of {model.architecture}; name a checkpoint that was "
                "trained for this model"
            )
        return ids

    def check_fits(self, model: ModelConfig) -> None:
        """Raise ModelLoadError unless the layer has the sizes of this model."""
        self.inner_layers(model)
        sizes = (
            ("hidden_size", self.model_hidden_size, model.hidden_size),
            ("vocab_size", self.vocab_size, model.vocab_size),
        )
        for name, ours, theirs in sizes:
            if ours != theirs:
                raise ModelLoadError(
                    f"speculation.model was trained for a model with a {name} of {ours}, but "
                    f"{model.architecture} has {theirs}: name a checkpoint that was trained for this model"
                )


def is_eagle3(directory: Path) -> bool:
    """Whether a directory's config.json is that of an EAGLE-3 checkpoint."""
    path = directory / "config.json"
    try:
        _check_architecture(parse_json(path), "")
    except (ModelLoadError, OSError, ValueError, AttributeError, TypeError):
        return False
    return True


def _check_architecture(raw: Mapping[str, Any], name: str) -> None:
    """Raise ModelLoadError for another architecture, or another family's layer."""
    found = [str(each) for each in raw.get("architectures") or ()]
    is_plain = found == [_LLAMA] and raw.get("draft_vocab_size") is not None  # as SafeAILab/EAGLE names it
    kind = (raw.get(_LAYER) or raw).get("model_type", "llama")
    if not (is_plain or any(each in _ARCHITECTURES for each in found)):
        raise ModelLoadError(
            f"{name} describes a {', '.join(found) or 'model without a name'}, and no EAGLE-3 layer: expected the "
            f"architecture {', '.join(_ARCHITECTURES)}, or {_LLAMA} with a draft_vocab_size"
        )
    if kind not in ("llama", "speculators"):
        raise ModelLoadError(f"{name} describes a layer of the model_type {kind!r}: only 'llama' is supported")
