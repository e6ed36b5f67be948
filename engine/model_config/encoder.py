"""An encoder's configuration, read from its files. Nothing here imports torch or runs a model's own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from engine.base.errors import ModelLoadError
from engine.model_config.config import WeightType, weight_type
from engine.model_files.json_files import read_json, read_object
from engine.model_parts.config_keys import TrackedConfig, UnusedKeys, layered
from engine.model_parts.reading import check_kinds
from engine.model_parts.rope import RopeConfig

Raw = Mapping[str, Any]
EncoderActivation = Literal["gelu", "gelu_tanh"]
"""GELU itself, or its tanh approximation (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
EncoderPooling = Literal["cls", "mean"]
"""The value of a prompt: its first token's hidden state, or the mean of all tokens' states."""
_ACTIVATIONS: Mapping[str, EncoderActivation] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_POOLINGS: Mapping[str, EncoderPooling] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
}
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """The properties in which layers may differ."""

    rope: RopeConfig | None = None
    """How positions rotate queries and keys; None if they do not."""
    reach: int | None = None
    """Number of positions before and after its own to which a query attends; None for all."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """One encoder: its size, and the parts of the common encoder that it is composed of."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    """The longest prompt, in tokens."""
    num_heads: int
    intermediate_size: int
    layers: tuple[EncoderLayer, ...]
    norm_eps: float
    activation: EncoderActivation
    dtype: WeightType
    """Type of the checkpoint's weights."""
    pooling: EncoderPooling
    """How a prompt's tokens become its value, which is returned or read by the classification head."""
    is_modern: bool = False
    """Whether it is a ModernBERT: norms before attention and MLP, gates, no embeddings of positions. Otherwise it
    is an XLM-R, which has norms after both."""
    has_biases: bool = True
    """Whether attention's projections have biases; those of an XLM-R and all its norms have."""
    mlp_bias: bool = True
    norm_bias: bool = True
    num_positions: int = 0
    """Rows of the table of positions."""
    num_token_types: int = 0
    pad_token_id: int = 0
    """The token without a position in an XLM-R; positions start after its number."""
    has_head: bool = False
    """Whether a classification head gives each prompt a score."""
    head_bias: bool = True
    eos_token_ids: frozenset[int] = frozenset()
    """Empty, because an encoder generates nothing."""
    unused_keys: UnusedKeys = field(default=UnusedKeys(), compare=False)
    """The keys of config.json that were not read."""

    @classmethod
    def from_directory(cls, directory: Path) -> EncoderConfig:
        """Read a model's files. Raises ModelLoadError."""
        tracked = TrackedConfig(read_object(directory / "config.json"))
        architecture = encoder_of(tracked)
        if architecture is None:
            raise ModelLoadError(f"{directory} holds no encoder; supported are {', '.join(ENCODERS)}")
        if tracked.get("is_decoder"):
            raise ModelLoadError(
                "is_decoder is true, which is not supported: expected an encoder, which sees all tokens"
            )
        try:
            config = ENCODERS[architecture](tracked, architecture)
        except KeyError as missing:
            raise ModelLoadError(f"config.json lacks the key {missing}; download the model again") from None
        except ModelLoadError:
            raise
        except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
            raise ModelLoadError(f"config.json holds a value of the wrong type: {error}") from error
        if config.hidden_size % config.num_heads:
            raise ModelLoadError(f"{config.num_heads} heads cannot share hidden_size {config.hidden_size} evenly")
        if not config.has_head:
            config = replace(config, pooling=_pooling(directory))
        longest = read_object(directory / "sentence_bert_config.json").get("max_seq_length")
        if isinstance(longest, int) and longest > 0:
            config = replace(config, max_position_embeddings=min(longest, config.max_position_embeddings))
        return replace(config, unused_keys=UnusedKeys.of(tracked))

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.hidden_size // self.num_heads

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def task(self) -> Literal["embed", "rerank"]:
        """The task that it serves."""
        return "rerank" if self.has_head else "embed"


def encoder_of(raw: Any) -> str | None:
    """Return the encoder that the contents of a config.json name; None if they name none."""
    named = raw.get("architectures") if isinstance(raw, Mapping) else None
    names = named if isinstance(named, list) else []
    return next((name for name in names if isinstance(name, str) and name in ENCODERS), None)


def is_encoder(directory: Path) -> bool:
    """Whether a model's files describe an encoder."""
    return encoder_of(read_object(directory / "config.json")) is not None


def _read_xlm_roberta(raw: Raw, architecture: str) -> EncoderConfig:
    """XLM-R (Conneau et al. 2019, arXiv:1911.02116), with which BGE-M3 begins."""
    if (kind := raw.get("position_embedding_type") or "absolute") != "absolute":
        raise ModelLoadError(f"unsupported position_embedding_type {kind!r}; supported is absolute")
    pad, rows = int(raw.get("pad_token_id", 1)), int(raw["max_position_embeddings"])
    return EncoderConfig(
        architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        max_position_embeddings=rows - pad - 1,
        num_heads=int(raw["num_attention_heads"]),
        intermediate_size=int(raw["intermediate_size"]),
        layers=(EncoderLayer(),) * int(raw["num_hidden_layers"]),
        norm_eps=float(raw.get("layer_norm_eps", 1e-12)),
        activation=_activation(raw.get("hidden_act", "gelu")),
        dtype=weight_type(raw),
        pooling="cls",
        num_positions=rows,
        num_token_types=int(raw.get("type_vocab_size", 1)),
        pad_token_id=pad,
        has_head=_has_head(raw, architecture),
    )


def _read_modernbert(raw: Raw, architecture: str) -> EncoderConfig:
    """ModernBERT (Warner et al. 2024, arXiv:2412.13663): two of three layers attend within a window."""
    hidden, heads, count = (int(raw[key]) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    step = int(raw.get("global_attn_every_n_layers", 3))
    kinds = raw.get("layer_types") or [
        "sliding_attention" if layer % step else "full_attention" for layer in range(count)
    ]
    if len(kinds) != count:
        raise ModelLoadError(f"layer_types lists {len(kinds)} layers, num_hidden_layers says {count}")
    check_kinds(kinds, "sliding_attention", "full_attention")
    pooling = raw.get("classifier_pooling", "cls")
    has_head = _has_head(raw, architecture)
    for key in ("layer_norm_eps", "position_embedding_type"):
        raw.get(key)  # published files have these keys of other encoders; ModernBERT ignores them
    if (act := raw.get("classifier_activation", "gelu")) != "gelu" and has_head:
        raise ModelLoadError(f"unsupported classifier_activation {act!r}; supported is gelu")
    if pooling not in _POOLINGS:
        raise ModelLoadError(f"unsupported classifier_pooling {pooling!r}; supported are cls and mean")
    return EncoderConfig(
        architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        max_position_embeddings=int(raw["max_position_embeddings"]),
        num_heads=heads,
        intermediate_size=int(raw["intermediate_size"]),
        layers=_modern_layers(raw, kinds, hidden // heads),
        norm_eps=float(raw.get("norm_eps", 1e-5)),
        activation=_activation(raw.get("hidden_activation", "gelu")),
        dtype=weight_type(raw),
        pooling=_POOLINGS[pooling],
        is_modern=True,
        has_biases=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        norm_bias=bool(raw.get("norm_bias", False)),
        has_head=has_head,
        head_bias=bool(raw.get("classifier_bias", False)),
    )


def _modern_layers(raw: Raw, kinds: Sequence[str], head_dim: int) -> tuple[EncoderLayer, ...]:
    """Read the two kinds of layers, with rotations under old keys or under those of transformers 5."""
    named, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    thetas = {
        "full_attention": float(raw.get("global_rope_theta") or 160000.0),
        "sliding_attention": float(raw.get("local_rope_theta") or raw.get("global_rope_theta") or 10000.0),
    }
    limit, reach = int(raw["max_position_embeddings"]), int(raw.get("local_attention", 128)) // 2
    layers = {}
    for kind, theta in thetas.items():
        parameters = layered(scaling, named.get(kind) or {}, {"rope_theta": theta})
        rope = RopeConfig.from_parameters(parameters, head_dim, limit)
        layers[kind] = EncoderLayer(rope, reach if kind == "sliding_attention" else None)
    return tuple(layers[kind] for kind in kinds)


ENCODERS: Mapping[str, Callable[[Raw, str], EncoderConfig]] = {
    "XLMRobertaModel": _read_xlm_roberta,
    "XLMRobertaForSequenceClassification": _read_xlm_roberta,
    "ModernBertModel": _read_modernbert,
    "ModernBertForSequenceClassification": _read_modernbert,
}
"""The reader of each supported architecture."""


def _has_head(raw: Raw, architecture: str) -> bool:
    """Whether it has a classification head. Raises ModelLoadError for one that gives several scores."""
    if not architecture.endswith("ForSequenceClassification"):
        return False
    labels = raw.get("id2label")
    count = len(labels) if labels is not None else int(raw.get("num_labels", 2))
    if count != 1:
        raise ModelLoadError(
            f"the classification head gives {count} scores (id2label), expected 1: a reranker such as "
            "BAAI/bge-reranker-v2-m3"
        )
    return True


def _activation(named: str) -> EncoderActivation:
    if named not in _ACTIVATIONS:
        raise ModelLoadError(f"unsupported activation {named!r}; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[named]


def _pooling(directory: Path) -> EncoderPooling:
    """Return how sentence-transformers pools the model. Raises ModelLoadError for an unsupported way."""
    modules = {_kind(module): module for module in _list(directory / "modules.json")}
    if "Pooling" not in modules:
        raise ModelLoadError(
            f"the files of {directory} do not say how its embeddings are pooled: expected modules.json and "
            "1_Pooling/config.json, as sentence-transformers writes them; use a version of the model with them"
        )
    if unknown := [kind for kind in modules if kind not in _MODULES]:
        raise ModelLoadError(
            f"the model's modules.json has {', '.join(unknown)}, and only {', '.join(_MODULES)} are supported"
        )
    stated = read_object(directory / Path(str(modules["Pooling"].get("path", ""))).name / "config.json")
    flags = [name.removeprefix("pooling_mode_") for name, value in stated.items() if value is True]
    mode = stated.get("pooling_mode", [flag for flag in flags if flag != "include_prompt"])
    modes = mode if isinstance(mode, list) else [mode]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelLoadError(
            f"the model's pooling of embeddings is {', '.join(map(str, modes)) or 'not in its files'}; "
            "supported are cls and mean"
        )
    return _POOLINGS[modes[0]]


def _kind(module: Mapping[str, Any]) -> str:
    return str(module.get("type")).rpartition(".")[2]


def _list(path: Path) -> list[dict[str, Any]]:
    found = read_json(path)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
