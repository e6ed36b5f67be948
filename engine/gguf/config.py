"""Reads a GGUF model's metadata as the config.json that the model's family would have.

llama.cpp's converter changes some models (its convert_hf_to_gguf.py). The key "gguf" lists the changes, which
loading the weights undoes:

    turns_neighbours    the two numbers of a rotated pair of a query or key are adjacent
    norms_have_one      the one is in the norms' weights that the family adds to them
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.base.errors import ModelLoadError
from engine.base.files import open_regular
from engine.gguf.files import GGUFModel

_Config = dict[str, Any]
_MOST_FACTORS = 2**15
_PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def config_of(model: GGUFModel) -> _Config:
    """Return the content of config.json. It includes unknown keys of the architecture as they are in the file.
    Raises ModelLoadError.
    """
    path, metadata = model.paths[0], model.metadata
    if (kind := metadata.get("general.type", "model")) != "model":
        raise ModelLoadError(f"{path} has general.type {str(kind)[:40]!r}; expected a file of type 'model'")
    named = metadata.get("general.architecture")
    if not isinstance(named, str) or named not in ARCHITECTURES:
        raise ModelLoadError(
            f"{path} has general.architecture {str(named)[:40]!r}, which is not supported in GGUF; supported are "
            f"{', '.join(ARCHITECTURES)}. Use the model as safetensors"
        )
    version = metadata.get("general.quantization_version", 2)
    if version != 2 and any(not tensor.type.is_plain for tensor in model.tensors.values()):
        raise ModelLoadError(f"{path} has general.quantization_version {str(version)[:40]}; expected 2")
    keys, architecture = _Keys(model, named), ARCHITECTURES[named]
    config = _common(keys)
    config |= {"architectures": [architecture.name], "model_type": named, **architecture.read(keys, config)}
    unknown = {key: value for key, value in model.metadata.items() if keys.is_unread(key)}
    layout = {
        "turns_neighbours": architecture.turns_neighbours,
        "norms_have_one": architecture.norms_have_one,
    }
    return {**config, **unknown, "gguf": layout}


class _Keys:
    """The keys of a model's architecture. It tracks those that were read."""

    def __init__(self, model: GGUFModel, architecture: str) -> None:
        self.model, self._architecture = model, architecture
        self.read: set[str] = set()

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a count. Raises ModelLoadError if it is missing and has no default."""
        value = self._value(key, default)
        if type(value) is not int or value < 0:
            raise self._wrong(key, value, "a count")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        rounded = np.float32(value)
        return float(str(rounded)) if rounded == value else value  # the shortest decimals for these 32 bits

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def optional(self, **names: str) -> _Config:
        """Return the numbers that exist, under the names of config.json; `names` maps these to keys."""
        return {name: self.number(key) for name, key in names.items() if self.has(key)}

    def has(self, key: str) -> bool:
        """Whether the metadata have a key of the architecture."""
        return f"{self._architecture}.{key}" in self.model.metadata

    def each(self, key: str) -> Sequence[Any] | None:
        """Return a list with a value for each layer; None if there is none, or one value for all."""
        value = self.model.metadata.get(f"{self._architecture}.{key}")
        if not isinstance(value, list):
            return None
        self.read.add(f"{self._architecture}.{key}")
        return value

    def is_unread(self, name: str) -> bool:
        """Whether a key of the metadata is one of the architecture that nothing has read."""
        return name.startswith(f"{self._architecture}.") and name not in self.read

    def _value(self, key: str, default: Any) -> Any:
        """Return a value; of a list with a value for each layer, the common one."""
        name = f"{self._architecture}.{key}"
        self.read.add(name)
        value = self.model.metadata.get(name, default)
        if value is None:
            raise ModelLoadError(f"{self.model.paths[0]} lacks the key {name}; download the model again")
        if not isinstance(value, list):
            return value
        if not value or any(each != value[0] for each in value):
            raise ModelLoadError(
                f"{self.model.paths[0]} has a {name} that differs between layers, which is not supported in GGUF: "
                "use the model as safetensors"
            )
        return value[0]

    def _wrong(self, key: str, value: Any, expected: str) -> ModelLoadError:
        name, path = f"{self._architecture}.{key}", self.model.paths[0]
        return ModelLoadError(f"{path} has {name} = {str(value)[:40]}; expected {expected}; download it again")


def _common(keys: _Keys) -> _Config:
    """Return the keys that all architectures have."""
    model, hidden, heads = keys.model, keys.integer("embedding_length"), keys.integer("attention.head_count")
    if keys.integer("expert_count", 0):
        raise ModelLoadError(
            f"{model.paths[0]} is a mixture of experts, which is not supported in GGUF: use it as safetensors"
        )
    head_dim = keys.integer("attention.key_length", hidden // max(heads, 1))
    if (other := keys.integer("attention.value_length", head_dim)) != head_dim:
        raise ModelLoadError(
            f"{model.paths[0]} has keys of {head_dim} numbers and values of {other}; expected the same"
        )
    context, turned = keys.integer("context_length"), keys.integer("rope.dimension_count", head_dim)
    keys.text("tensor_data_layout", "")  # an old key for the order of `turns_neighbours`
    keys.integer("pooling_type", 0)  # read elsewhere (`engine/gguf/documents.py`)
    tokens, stated = model.metadata.get("tokenizer.ggml.tokens"), keys.integer("vocab_size", 0)
    return {
        "hidden_size": hidden,
        "num_hidden_layers": keys.integer("block_count"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": len(tokens) if isinstance(tokens, list) else stated,
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "is_causal": keys.flag("attention.causal", True),
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in model.tensors,
        "dtype": _dtype(model),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys, turned, context),
        **({} if turned == head_dim else {"partial_rotary_factor": _turned_part(keys, turned, head_dim)}),
    }


def _turned_part(keys: _Keys, turned: int, head_dim: int) -> float:
    """Return the rotated part of a head, in architectures in which it may be less than all."""
    named = keys.model.metadata["general.architecture"]
    if not ARCHITECTURES[named].turns_parts or not 0 < turned < head_dim:
        raise ModelLoadError(
            f"{keys.model.paths[0]} has {named}.rope.dimension_count = {turned}, which is not supported: expected "
            f"{head_dim}, all numbers of a head"
        )
    return turned / head_dim


def _dtype(model: GGUFModel) -> str:
    """Return the type of most of the layers' numbers, as config.json spells it; bfloat16 if they are quantized."""
    counts: Counter[str] = Counter()
    for tensor in model.tensors.values():
        if len(tensor.shape) > 1:
            counts[tensor.type.name] += tensor.num_numbers
    most = counts.most_common(1)
    return _PLAIN_TYPES.get(most[0][0], "bfloat16") if most else "float32"


def _rope_scaling(keys: _Keys, turned: int, context: int) -> _Config | None:
    """Return config.json's settings for a stretched context; None if it was not stretched."""
    path, tensors = keys.model.paths[0], keys.model.tensors
    kind, factor = keys.text("rope.scaling.type", "none"), keys.number("rope.scaling.factor", 0.0)
    is_typed = keys.has("rope.scaling.type")
    keys.flag("rope.scaling.finetuned", False)
    original = keys.integer("rope.scaling.original_context_length", 0)
    temperature = keys.number("rope.scaling.attn_factor", 1.0)
    by_length = [f"rope_factors_{each}.weight" for each in ("short", "long")]
    single = "rope_freqs.weight"
    if any(name in tensors for name in (*by_length, single)):
        if kind not in ("none", "longrope") or factor not in (0.0, 1.0):
            raise ModelLoadError(
                f"{path} has factors of frequencies and rope.scaling.type {kind!r} with factor {factor}, which is "
                "not supported: expected one of both"
            )
        names = [single] * 2 if single in tensors else by_length
        if missing := [name for name in names if name not in tensors]:
            raise ModelLoadError(f"{path} lacks {missing[0]}; download the model again")
        short, long = (_factors(keys.model, name, turned) for name in names)
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": temperature,
            "factor": 1.0,
            "original_max_position_embeddings": original or context,
        }
    if temperature != 1.0:
        raise ModelLoadError(f"{path} has a rope.scaling.attn_factor of {temperature} without factors; expected 1")
    if kind == "yarn":
        yarn = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original or context}
        return yarn | keys.optional(
            beta_fast="rope.scaling.yarn_beta_fast", beta_slow="rope.scaling.yarn_beta_slow"
        )
    if kind == "linear" or not is_typed:
        return {"rope_type": "linear", "factor": factor} if factor not in (0.0, 1.0) else None
    if kind != "none":
        raise ModelLoadError(
            f"{path} has rope.scaling.type {kind[:40]!r}; supported are none, linear, yarn and longrope"
        )
    return None


def _factors(model: GGUFModel, name: str, turned: int) -> list[float]:
    """Return the divisors of frequencies in a tensor, one for each rotated pair of numbers."""
    tensor = model.tensors[name]
    if tensor.type.name != "F32" or tensor.shape != (turned // 2,) or turned > _MOST_FACTORS:
        raise ModelLoadError(
            f"{tensor.path} has {name} {list(tensor.shape)} as {tensor.type.name}; expected [{turned // 2}] as F32"
        )
    with open_regular(tensor.path) as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{turned // 2}f", file.read(tensor.num_bytes)))


def _nothing_more(keys: _Keys, config: _Config) -> _Config:
    return {}


def _read_gemma2(keys: _Keys, config: _Config) -> _Config:
    scores = (
        config["hidden_size"] // max(config["num_attention_heads"], 1) if config["num_hidden_layers"] == 46 else 0
    )
    return {
        "query_pre_attn_scalar": scores or config["head_dim"],  # not in GGUF: by size, like llama.cpp
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        **keys.optional(
            attn_logit_softcapping="attn_logit_softcapping", final_logit_softcapping="final_logit_softcapping"
        ),
    }


def _read_gemma3(keys: _Keys, config: _Config) -> _Config:
    scores = (
        config["hidden_size"] // max(config["num_attention_heads"], 1) if config["num_hidden_layers"] == 62 else 0
    )
    pattern = keys.each("attention.sliding_window_pattern")
    kinds = {0: "full_attention", 1: "sliding_attention"}
    layers = {"layer_types": [kinds.get(each) for each in pattern]} if pattern is not None else {}
    return {
        "rope_theta": keys.number("rope.freq_base", 1e6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": scores or config["head_dim"],  # as above
        "sliding_window": keys.integer("attention.sliding_window"),
        **(layers or {"sliding_window_pattern": keys.integer("attention.sliding_window_pattern", 6)}),
        **keys.optional(final_logit_softcapping="final_logit_softcapping"),
    }


def _read_phi3(keys: _Keys, config: _Config) -> _Config:
    original = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = keys.integer("attention.sliding_window", 0)
    return {"original_max_position_embeddings": original, "sliding_window": window or None}


def _read_granite(keys: _Keys, config: _Config) -> _Config:
    return {
        "attention_multiplier": keys.number("attention.scale", max(config["head_dim"], 1) ** -0.5),
        **keys.optional(
            embedding_multiplier="embedding_scale",
            residual_multiplier="residual_scale",
            logits_scaling="logit_scale",
        ),
    }


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of GGUF."""

    name: str
    """Its name in config.json."""
    read: Callable[[_Keys, _Config], _Config] = _nothing_more
    """Returns the config with the architecture's own keys added."""
    turns_neighbours: bool = False
    norms_have_one: bool = False
    turns_parts: bool = False
    """Whether positions may rotate only a part of each head."""


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", turns_neighbours=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "gemma2": Architecture("Gemma2ForCausalLM", _read_gemma2, norms_have_one=True),
    "gemma3": Architecture("Gemma3ForCausalLM", _read_gemma3, norms_have_one=True),
    "phi3": Architecture("Phi3ForCausalLM", _read_phi3, turns_parts=True),
    "granite": Architecture("GraniteForCausalLM", _read_granite, turns_neighbours=True),
}
"""The supported architectures, by their names in GGUF."""
